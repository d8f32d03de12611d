"""How fast are the copies and updates of this machine? The probes return a ``HardwareProfile``.

The method (``method``) is to warm up, repeat, keep every sample and verify the results; a quantity that cannot be
measured is waived with the reason. The probes (``transfers``, ``host_bandwidth``, ``adam_throughput``,
``matrix``, ``collectives``) copy and compute through the ``Device`` interface, the Adam kernels and the process groups
that training uses. All ranks run each repetition at the same time (``ranks``), and the slowest rank counts.
``probe_list`` lists the probes and ``measure`` runs them; ``cache`` keeps a quick profile for the next training run on
an equal machine.
"""
