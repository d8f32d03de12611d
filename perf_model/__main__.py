"""``python -m perf_model``."""

import sys

from perf_model.cli.main import main

sys.exit(main())
