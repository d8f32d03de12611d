"""Let LLaMA-Factory import a ``torchaudio`` that contains nothing: PyPI has no build for the PyTorch of the CPU.

It reads sound with it, which no case contains.
"""

import importlib.machinery
import sys
import types

sys.modules["torchaudio"] = module = types.ModuleType("torchaudio")
module.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
