"""Commands of child Python processes, which never import modules from the working directory.

``python -m`` puts the working directory first on the module search path, so that a ``numpy.py`` in a downloaded folder
would run. Children start with ``-P``, and their environment makes their own children do the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SOURCE_FOLDER = str(Path(__file__).resolve().parents[2])
"""Folder that holds this package."""


def python_command(module: str) -> list[str]:
    """Command that runs a module of this package with this interpreter.

    >>> python_command("shapewright.app.cli")[1:]
    ['-P', '-m', 'shapewright.app.cli']
    """
    return [sys.executable, "-P", "-m", module]


def child_environment() -> dict[str, str]:
    """Environment of a child: this package on its search path, and the working directory on none.

    An empty entry of PYTHONPATH, as ``PYTHONPATH=$PYTHONPATH:/folder`` leaves it, means the working directory.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [SOURCE_FOLDER, *filter(None, given)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
