"""Do all ranks plan from a profile of this machine, and run the same plan?"""
