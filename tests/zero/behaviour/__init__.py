"""Do the features of DeepSpeed work with the plugin as they do with stock?"""
