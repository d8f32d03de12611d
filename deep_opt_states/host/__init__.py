"""Which cores, NUMA nodes and memory does this machine give to each rank?"""
