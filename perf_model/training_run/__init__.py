"""How long does a training run of a given model take with each way to update, and does it fit in memory?"""
