"""Which actions does an update consist of, in which order, and which of them wait for which?"""
