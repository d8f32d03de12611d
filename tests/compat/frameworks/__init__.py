"""Train with the fine-tuning frameworks that people use, by their own commands, with stock and with the plugin."""
