"""Are checkpoints interchangeable with those of stock, also after a run is killed?"""
