"""Does every rank stop when an update fails or a process ends?"""
