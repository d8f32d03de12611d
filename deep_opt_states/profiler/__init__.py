"""How fast are the copies and updates of this machine? The probes return a ``HardwareProfile``.

The method (``method``) is to warm up, repeat, keep every sample and verify the results; a quantity that cannot be
measured is waived with the reason. The probes (``transfers``, ``host_bandwidth``, ``adam_throughput``,
``matrix``) copy and compute through the ``Device`` interface and the Adam kernels that training uses. All ranks run
each repetition at the same time (``ranks``), and the slowest rank counts. ``measure`` lists the probes; ``cache`` keeps
a quick profile for the next training run on an equal machine.
"""
