"""Do logs, monitor events and reports show the measured times?"""
