"""Report the updates of a training run: in the log, to DeepSpeed's monitor, and as a folder with an HTML page."""
