"""Settings that all tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

# Helper modules that several folders use (pytest's importlib mode leaves sys.path alone).
sys.path.insert(0, str(Path(__file__).parent))

# What is printed must not hang on the width of whoever's terminal.
os.environ.pop("COLUMNS", None)

# The same examples on every run, so that a failure is a change in the code. HYPOTHESIS_PROFILE=explore seeks new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
