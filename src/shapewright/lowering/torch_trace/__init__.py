"""Tracing of PyTorch modules: run on the meta device, and turn what is dispatched into operations.

Modules here import torch only inside functions.
"""

from __future__ import annotations

import re

DEFAULT_TIME_LIMIT_S = 120.0
TARGET = r"(?P<file>.+\.py):(?P<name>[A-Za-z_][\w.]*)"  # compiled where a text is compared, not for a help page


def is_target(source: object) -> bool:
    """Whether a text names a callable of a Python file.

    >>> is_target("my_model.py:build"), is_target("config.json"), is_target("org/model")
    (True, False, False)
    """
    return isinstance(source, str) and re.fullmatch(TARGET, source) is not None
