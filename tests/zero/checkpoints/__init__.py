"""Are checkpoints interchangeable with stock's, also after a run is killed?"""
