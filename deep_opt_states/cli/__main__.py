from __future__ import annotations

import sys

from deep_opt_states.cli import main

sys.exit(main())
