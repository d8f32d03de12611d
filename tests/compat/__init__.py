"""Compare the plugin with stock on every supported release of DeepSpeed and PyTorch."""
