"""Run the console and Python blocks of Markdown pages and insert their output.

A console block begins with ``$ shapewright`` and is run 100 columns wide; ``| head -N`` keeps the first N lines. In a
Python block, the output of a statement follows it as a comment.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import tempfile

from shapewright.app.cli import main as run_command

NUM_COLUMNS = 100
PRINTED = "# -> "
_HEAD = re.compile(r" \| head -(\d+)$")


def refresh_blocks(text: str) -> str:
    """The text of a page with the output of every console and Python block refreshed."""
    text = re.sub(
        r"```console\n(\$ shapewright .*?)```\n", lambda found: console_block(found[1]), text, flags=re.DOTALL
    )
    return re.sub(r"```python\n(.*?)```\n", lambda found: python_block(found[1]), text, flags=re.DOTALL)


def console_block(body: str) -> str:
    """A console block with the current output of its commands."""
    commands = [line for line in body.splitlines() if line.startswith("$ shapewright ")]
    shown = "".join(f"{command}\n{printed_by(command)}" for command in commands)
    return f"```console\n{shown}```\n"


def printed_by(command: str) -> str:
    """Output of a command at the page width, without trailing blanks."""
    out = io.StringIO()
    head = _HEAD.search(command)
    words = shlex.split(_HEAD.sub("", command))[2:]
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(NUM_COLUMNS)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,  # for files that the command writes
            contextlib.chdir(folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(io.StringIO()) as errors,
            contextlib.suppress(SystemExit),
        ):
            run_command(words)
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    # Messages and progress on standard error are not shown, but a usage error is a mistake of the page.
    assert not errors.getvalue().startswith("shapewright: "), f"{command}: {errors.getvalue()}"
    lines = out.getvalue().splitlines()[: int(head[1]) if head else None]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def python_block(body: str) -> str:
    """A Python block with the current output of its statements."""
    source = "".join(f"{line}\n" for line in body.splitlines() if not line.startswith(PRINTED))
    lines = source.splitlines()
    shown, names, done = [], {"__name__": "page"}, 0
    for statement in ast.parse(source).body:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(ast.Module([statement], []), "page", "exec"), names)
        assert statement.end_lineno is not None
        shown += lines[done : statement.end_lineno] + [PRINTED + line for line in out.getvalue().splitlines()]
        done = statement.end_lineno
    return "```python\n" + "".join(f"{line}\n" for line in shown + lines[done:]) + "```\n"
