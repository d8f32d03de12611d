"""Does the executor give the serial bits, whatever the timing?"""
