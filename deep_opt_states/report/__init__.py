"""How do measured updates compare with the prediction? The log, DeepSpeed's monitor and an HTML page show it."""
