"""Use the private names of DeepSpeed: no other folder does."""
