"""Does training on a device that is asynchronous, with memory of its own, have the bits of stock on the CPU?"""
