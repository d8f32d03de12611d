"""Predict the iteration time and the memory of a training run with each way to update its optimizer states."""
