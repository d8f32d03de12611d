"""Does the path for CUDA work on a device that is asynchronous and whose memory the host cannot touch?

The device is software: an extension of PyTorch whose streams are threads and whose memory is protected. See
``docs/dev/testing.md``.
"""
