"""Which parallel layout trains a model on a cluster fastest?"""
