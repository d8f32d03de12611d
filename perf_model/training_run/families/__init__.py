"""Which parameters has a model of a known family? The counts, names and orders are those of transformers 5."""
