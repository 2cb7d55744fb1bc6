"""Settings that all tests share."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import shapewright
from shapewright.app.report import columns
from shapewright.app.report.flags import flags_by_field, with_flags
from shapewright.core.errors import ShapewrightError
from shapewright.core.notes import Note
from shapewright.core.texts import FieldName, Text

# Helper modules that several folders use (pytest's importlib mode leaves sys.path alone).
sys.path.insert(0, str(Path(__file__).parent))

# What is printed must not hang on the width of whoever's terminal.
os.environ.pop("COLUMNS", None)

# The same examples on every run, so that a failure is a change in the code. HYPOTHESIS_PROFILE=explore seeks new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session", autouse=True)
def texts_name_fields_by_type() -> Iterator[None]:
    """Errors and notes name fields that have a flag by ``with_fields``, so that the command line can write the flag."""
    flags = flags_by_field()
    in_plain_text = re.compile(r"(?<![\w.'\"=/-])([a-z]+(?:_[a-z0-9]+)+)(?![\w.='\"/([])|\bset [a-z_]+='[a-z0-9-]+'")
    choices = re.compile(
        r"(?:choose (?:among|one of|from)|sweep one of|it (?:has|chooses)|known are|"
        r"(?:its columns|known keys|not stated):) [^;]*"
    )
    # Commands in quotes are typed as they are; other flags mean nothing in Python.
    flag = re.compile(r"(?<![\w'\"-])--[a-z]")
    command = re.compile(r"'[^']* --[^']*'")
    # Refits are run as a command alone, and values that core checks have the names that commands give them.
    package = str(Path(shapewright.__file__).parent)
    commands = tuple(f"{package}/{part}/" for part in ("app", "core", "measure/refit"))
    make_error, make_note = ShapewrightError.__init__, Note.__new__

    def check(text: str, *, of_library: bool = False) -> None:
        parts = text.parts if isinstance(text, Text) else (text,)
        plain = "".join("FIELD" if isinstance(part, FieldName) else part for part in parts)
        named = [
            found[0]
            for found in in_plain_text.finditer(choices.sub("", plain))
            if found[1] is None or found[1] in flags
        ]
        assert not named, f"{named} in {plain!r}: name fields by with_fields"
        if of_library:
            assert not flag.search(command.sub("", plain)), f"{plain!r}: name fields by with_fields, not flags"

    def checked_error(self: ShapewrightError, *arguments: Any, **keywords: Any) -> None:
        make_error(self, *arguments, **keywords)
        raised_in = sys._getframe(1).f_code.co_filename
        check(self.text, of_library=raised_in.startswith(package) and not raised_in.startswith(commands))

    def checked_note(cls: type[Note], text: str, *arguments: Any, **keywords: Any) -> Note:
        note = make_note(cls, text, *arguments, **keywords)
        check(note)
        return note

    def checked_line(text: str) -> str:
        check(text)
        return with_flags(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShapewrightError, "__init__", checked_error)
        patch.setattr(Note, "__new__", checked_note)
        patch.setattr(columns, "with_flags", checked_line)
        yield
