"""Is the plugin enabled, refused or disabled as the JSON config requires?"""
