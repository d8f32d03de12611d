"""How long does a schedule take on a given machine, and how much memory does it need?"""
