"""How long does an iteration take with each way to update the optimizer states, and does the run fit in memory?"""
