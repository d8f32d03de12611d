"""Which private names of DeepSpeed does the plugin use? No other folder uses any."""
