"""Does training with Trainer, TRL, Accelerate and Lightning have the bits of stock?"""
