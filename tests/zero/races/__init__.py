"""Are all accesses of the real engine ordered, and are missing waits found?"""
