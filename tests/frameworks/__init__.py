"""Is training with Trainer, TRL, Accelerate and Lightning bit-identical to stock?"""
