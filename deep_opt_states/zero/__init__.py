"""The one package that knows DeepSpeed's ZeRO-3: what we touch of it, what we refuse, and the subclass."""
