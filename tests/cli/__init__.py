"""Do the commands of ``deep-opt-states`` print, write and refuse as documented?"""
