"""Find the cores, NUMA nodes and memory of this host, and divide them among the ranks on it."""
