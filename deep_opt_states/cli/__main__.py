"""``python -m deep_opt_states.cli``: the program ``deep-opt-states``, for launchers such as torchrun."""

from __future__ import annotations

import sys

from deep_opt_states.cli.main import main

sys.exit(main())
