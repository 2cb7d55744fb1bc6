"""Start a lint rule: its module with all headings, its case file, and its line in the list of rules.

python scripts/new_rule.py TC110 odd-something
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULES = ROOT / "src" / "shapewright" / "lint" / "rules"
FOLDERS = {
    "TC": "tensor_core",
    "WQ": "waves",
    "PL": "parallel",
    "ME": "memory_and_config",
    "CF": "memory_and_config",
    "SV": "serving",
}

MODULE = '''"""TODO: one sentence: what is wrong, and what it does.

## What it does

Fires when TODO.

## Why it is slow

TODO: the mechanism, with one measured number and its source.

## Example

>>> from shapewright.lint.example import fires
>>> fires("{code}")
True

## Use instead

>>> fires("{code}")
False

## Fix safety

TODO: `exact`, `runtime` or `retrain`, and what to mind.

## When it does not matter

TODO.

## References

- TODO.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(case: Scenario) -> Iterator[Violation]:
    """Look for TODO."""
    raise NotImplementedError


RULE = Rule(
    code="{code}",
    name="{name}",
    since="TODO",
    reads=(),
    check=check,
)
'''

CASES = """# {code} {name}

## Fires: TODO

```toml
```

## Silent: TODO

```toml
```

## Boundary: TODO

```toml
[expect]
fires = false
```
"""


def add_rule(code: str, name: str) -> None:
    """Write the files of a new rule; nothing is overwritten."""
    if not re.fullmatch(rf"({'|'.join(FOLDERS)})\d{{3}}", code) or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise SystemExit(f"{code!r} {name!r}: give a code such as TC110 and a name such as odd-something")
    module_name = name.replace("-", "_")
    module, cases = RULES / FOLDERS[code[:2]] / f"{module_name}.py", ROOT / "tests" / "lint" / f"{code}.md"
    for path in (module, cases):
        if path.exists():
            raise SystemExit(f"{path} is already there; choose another code or name")
    module.write_text(MODULE.format(code=code, name=name), encoding="utf-8")
    cases.write_text(CASES.format(code=code, name=name), encoding="utf-8")
    listing = RULES / "__init__.py"
    text = listing.read_text(encoding="utf-8")
    text = text.replace(
        "\n\nMODULES", f"\nfrom shapewright.lint.rules.{FOLDERS[code[:2]]} import {module_name}\n\nMODULES", 1
    )
    text = re.sub(r"(MODULES = \(\n.*?)(?=^\))", rf"\g<1>    {module_name},\n", text, flags=re.MULTILINE | re.DOTALL)
    listing.write_text(text, encoding="utf-8")
    print(f"wrote {module}, {cases} and a line in {listing}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("code", help="family and number, such as TC110")
    parser.add_argument("name", help="what is wrong, such as odd-something")
    given = parser.parse_args()
    add_rule(given.code, given.name)
