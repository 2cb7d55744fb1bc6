"""Start a lint rule: its function with all headings in the module of its subject, and its case file.

python scripts/new_rule.py alignment TC111 odd-something
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULES = ROOT / "src" / "shapewright" / "lint" / "rules"
FAMILIES = ("TC", "WQ", "PL", "ME", "CF", "SV")

FUNCTION = '''

@rule("{code}", "{name}", reads=(), since="TODO")
def {function}(scenario: Scenario) -> Iterator[Violation]:
    """TODO: one sentence: what is wrong, and what it does.

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
    raise NotImplementedError
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


def add_rule(subject: str, code: str, name: str) -> None:
    """Append a new rule to the module of its subject, and write its test cases; nothing is overwritten."""
    if not re.fullmatch(rf"({'|'.join(FAMILIES)})\d{{3}}", code) or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise SystemExit(f"{code!r} {name!r}: give a code such as TC110 and a name such as odd-something")
    module, cases = RULES / f"{subject}.py", ROOT / "tests" / "lint" / f"{code}.md"
    if not module.exists():
        raise SystemExit(
            f"{subject!r}: choose one of {', '.join(sorted(path.stem for path in RULES.glob('[!_]*.py')))}"
        )
    if cases.exists():
        raise SystemExit(f"{cases} is already there; choose another code")
    with module.open("a", encoding="utf-8") as text:
        text.write(FUNCTION.format(code=code, name=name, function=name.replace("-", "_")))
    cases.write_text(CASES.format(code=code, name=name), encoding="utf-8")
    print(f"wrote {cases} and a function in {module}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", help="module of lint/rules, such as alignment")
    parser.add_argument("code", help="family and number, such as TC110")
    parser.add_argument("name", help="what is wrong, such as odd-something")
    given = parser.parse_args()
    add_rule(given.subject, given.code, given.name)
