"""Import the patches that ``CPU_PATCHES`` names, when Python starts: the frameworks' own commands start the ranks."""

import importlib
import os

for name in os.environ.get("CPU_PATCHES", "").split():
    importlib.import_module(name)
