"""Does the path for CUDA work on a device that is asynchronous and whose memory the host cannot touch?

The device is software, an extension of PyTorch: see ``docs/dev/testing.md``.
"""
