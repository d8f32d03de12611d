"""Which cores, NUMA nodes and memory does this host give to each rank?"""
