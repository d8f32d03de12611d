"""Does every missing wait give wrong numbers on the device, without a race detector?"""
