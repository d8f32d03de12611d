"""Measures this machine: probes in, a ``HardwareProfile`` out.

Measured as an instrument does (``method``): warm-up, repetitions, every sample kept, results verified, and what
cannot be measured waived with the reason. The probes (``transfers``, ``host_memory``, ``adam``, ``matrix``) move and
compute through the ``Device`` interface and the Adam kernels that training uses. All ranks run each repetition at once
(``ranks``), and the slowest counts. ``profile`` says which probes there are; ``cache`` keeps a quick profile for the
next training run on such a machine.
"""
