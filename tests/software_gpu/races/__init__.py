"""Are all accesses of the real engine ordered, whatever the timing was?"""
