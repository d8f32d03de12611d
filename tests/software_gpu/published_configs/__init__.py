"""Does the default run of a published config interleave, and is it at least twice as fast as stock? EMULATED.

A user has the ZeRO-3 offload config that LLaMA-Factory or axolotl publishes, and adds an empty block to it. Here both
configs train a small Llama with Hugging Face's Trainer on the software GPU, with stock and with the plugin. Every
second that is compared is EMULATED: no test of this folder measures a GPU.

The parts:

- ``published``: the configs, as they are published.
- ``emulated_h100``: which machine and training run is emulated, and how is it scaled to a small model?
- ``training``: how does the Trainer train, and what is measured?
- ``published_config_ranks``: which arms are trained?
"""
