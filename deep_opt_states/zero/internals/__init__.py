"""Which private parts of DeepSpeed does the plugin use? No other folder uses any."""
