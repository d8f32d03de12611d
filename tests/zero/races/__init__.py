"""Do random delays of ranks and workers change the bits or the order of collectives?"""
