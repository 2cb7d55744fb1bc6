"""Read commands of shell scripts with their variables substituted, without running anything.

Assignments, arrays, defaults such as ``${TP:-4}`` and arithmetic are read in order. Conditions are not evaluated and
commands are not run: what depends on them keeps its ``$``, so that no flag is lost silently.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any

from shapewright.app.formats.reading import literal
from shapewright.core.errors import ConfigError
from shapewright.core.records import dataclass

_MAX_CHARACTERS = 2**20  # of all words together, after substitution
_MAX_NESTING = 8  # of defaults in defaults
_FLAG = re.compile(r"--?[A-Za-z]")
_FLAG_INSIDE = re.compile(r"(?:^|\s)--?[A-Za-z]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_REDIRECTION = re.compile(r"(?:\d*|&)[<>]")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)")
_NAMED = re.compile(r"\$([A-Za-z_]\w*|[\d@*#?!$-])")
# Name, brackets of an array, and a default.
_BRACED = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(?:\[[@*]\])?(?::?([=-])(.*))?", re.DOTALL)
_UNKNOWN = re.compile(r"\$(?:[\w@*]+|\{[^}]*\}|\(.*\))")
_NAME = re.compile(r"\$?\b([A-Za-z_]\w*)")
_OPENING = ("if", "case", "for", "while", "until", "select")
_CLOSING = ("fi", "esac", "done")
_BEFORE_COMMANDS = ("then", "do", "else", "{")
_BEFORE_ASSIGNMENTS = ("export", "local", "readonly", "declare", "typeset", "env", "-x", "-a", "-r", "-i")
_OPERATORS = ("\n", ";", "&&", "||", "|", "&")
# Commands that set variables to what only a run of the script knows.
_SETTERS = ("for", "select", "read", "let", "unset", "getopts", "mapfile", "readarray", "printf")
_SET_BY_ARITHMETIC = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))")


@dataclass
class Script:
    """Commands of a script.

    Attributes:
        commands: Words of each command; variables that are not known keep their ``$``.
        variables: Values that the script sets, those of arrays joined by spaces.
        used: Names of variables that a command or another variable refers to.
        set_again: Names of variables with a known value that a condition, a loop or a command may change.
    """

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    set_again: set[str] = field(default_factory=set)
    num_characters: int = 0

    @property
    def unused(self) -> dict[str, str]:
        """Values of variables that hold flags and are never used."""
        values = {name: value for name, value in self.variables.items() if _FLAG_INSIDE.search(value)}
        return {name: value for name, value in values.items() if name not in self.used}

    def open_questions(self) -> tuple[str, ...]:
        """Names of variables whose values may be others than those taken, with the reason."""
        again = [f"${name} (set again, by what is not run)" for name in self.set_again & self.used]
        return (*sorted(again), *(f"${name} (not used)" for name in self.unused))


def read_script(text: str) -> Script:
    """Read a shell script, or a list of arguments over any number of lines.

    >>> read_script('TP=2; ARGS="--tp $TP --pp ${PP:-4}"; torchrun pretrain.py $ARGS --seed $SEED').commands
    [['torchrun', 'pretrain.py', '--tp', '2', '--pp', '4', '--seed', '$SEED']]

    Raises:
        ConfigError: quotes or brackets do not match, or substitution has no end.
    """
    script = Script()
    depth = 0
    is_chosen = False  # whether the command is run only if another one succeeds or fails
    words: list[str] = []
    for token in (*_tokens(_without_heredocs(text)), "\n"):
        if token not in _OPERATORS:
            words.append(token)
            continue
        while words and words[0] in _BEFORE_COMMANDS:
            words = words[1:]
        kind = words[0] if words else ""
        depth += (kind in _OPENING) - (kind in _CLOSING)
        _run(script, words, is_certain=depth <= 0 and not is_chosen)
        is_chosen = token in ("&&", "||")
        words = []
    return script


def arguments_of(words: list[str]) -> dict[str, Any]:
    """Values by flag, with underscores; True for a switch, words joined by spaces for several values.

    Variables and commands that are not known and may hold flags are keys too.

    >>> arguments_of(["train.py", "--bf16", "--num-layers", "2", "$MORE"])
    {'bf16': True, 'num_layers': '2', '$MORE': True}
    """
    arguments: dict[str, Any] = {}
    name = ""
    for place, word in enumerate(words):
        if _FLAG.match(word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            arguments[name] = value if equals else True
        elif place and _UNKNOWN.fullmatch(word) and arguments.get(name) is not True:
            arguments[word] = True
        elif name:
            arguments[name] = word if arguments[name] is True else f"{arguments[name]} {word}"
    return arguments


def _without_heredocs(text: str) -> str:
    """Text without the files that it holds, and with lines that continue joined."""
    lines: list[str] = []
    end = ""
    for line in text.replace("\r\n", "\n").replace("\\\n", " ").split("\n"):
        if end:
            end = "" if line.strip() == end else end
            continue
        lines.append(line)
        found = _HEREDOC.search(line) if "<<<" not in line else None
        end = found[1] if found else ""
    return "\n".join(lines)


def _tokens(text: str) -> Iterator[str]:
    """Words as they are written, and operators; an array is one word, ``NAME=(...)``."""
    is_list = bool(re.match(r"(?:\s|#[^\n]*\n)*--?[A-Za-z]", text))  # arguments alone, over any number of lines
    place, word, brackets, is_start = 0, "", 0, True
    # Found out once, at the first bracket of a word: a look at a whole long word for each character took minutes.
    is_array: bool | None = None
    while place < len(text):
        at, double = text[place], text[place : place + 2]
        in_array = brackets > 0 and bool(is_array)
        if at == "#" and (word[-1:] in ("", "(") or (in_array and word[-1] in " \t\n")):
            place = _find(text, "\n", place, missing=len(text))
            continue
        is_end, operator, length = False, "", 1
        if at in " \t\n" and not in_array:
            is_end, operator = True, "\n" if at == "\n" and not is_list else ""
        elif at in ";&|" and not in_array and not (at == "&" and (word[-1:] in ("<", ">") or double == "&>")):
            length = 2 if double in ("&&", "||", ";;") else 1
            is_end, operator = True, double if double in _OPERATORS else at
        elif double == "((" and not word and is_start and not is_list:  # arithmetic, as let has it
            is_end, word, length = True, "let", 2
        elif at == "(" and not word and is_start and not is_list:  # a subshell
            is_end = True
        elif at == ")" and not brackets and not is_list:  # its end, or the pattern of a case
            is_end, operator = True, "\n"
        if is_end:
            yield from filter(None, (word, operator))
            is_start = bool(operator) or (is_start and not word)
            word, brackets, is_array = "", 0, None
            place += length
            continue
        end = _end_of(text, place)
        if at == "(" and is_array is None:
            is_array = _ASSIGNMENT.fullmatch(word) is not None
        word += text[place:end]
        brackets += (at == "(") - (at == ")")
        is_start, place = False, end
    if brackets > 0 and is_array:
        raise ConfigError("the arguments cannot be read: a bracket is not closed; check the brackets of the file")
    if word:
        yield word


def _find(text: str, wanted: str, start: int, *, missing: int | None = None) -> int:
    place = text.find(wanted, start)
    if place >= 0:
        return place
    if missing is None:
        raise ConfigError(f"the arguments cannot be read: no closing {wanted}; check the quotes of the file")
    return missing


def _end_of(text: str, start: int) -> int:
    """Index after the part of a word that starts here: a quoted text, a substitution or a character."""
    first = text[start]
    if first == "\\":
        return min(start + 2, len(text))
    if first in "'`":
        return _find(text, first, start + 1) + 1
    if first == '"':
        place = start + 1
        while text[place : place + 1] != '"':
            if place >= len(text):
                raise ConfigError('the arguments cannot be read: no closing "; check the quotes of the file')
            place = place + 1 if text[place] == "'" else _end_of(text, place)
        return place + 1
    if text.startswith(("$(", "${"), start):
        opening = text[start + 1]
        closing = ")" if opening == "(" else "}"
        depth = 0
        for place in range(start + 1, len(text)):
            depth += (text[place] == opening) - (text[place] == closing)
            if not depth:
                return place + 1
        raise ConfigError(f"the arguments cannot be read: no closing {closing}; check the brackets of the file")
    return start + 1


def _run(script: Script, words: list[str], *, is_certain: bool) -> None:
    """Take the assignments before a command, and the command."""
    if words and words[0] in _BEFORE_ASSIGNMENTS:
        while words and words[0] in _BEFORE_ASSIGNMENTS:
            words = words[1:]
    script.set_again |= _set_by(words) & script.variables.keys()
    while words and (found := _ASSIGNMENT.match(words[0])):
        _assign(script, found, words[0][found.end() :], is_certain=is_certain)
        words = words[1:]
    expanded = list(_expanded(script, words))
    if expanded:
        script.commands.append(expanded)


def _set_by(words: list[str]) -> set[str]:
    """Names of the variables that a command sets.

    >>> sorted(_set_by(["while", "read", "-r", "TP", "PP"])), _set_by(["let", "TP*=2", "N == 3"])
    (['-r', 'PP', 'TP'], {'TP'})
    """
    place = next((place for place, word in enumerate(words[:3]) if word in _SETTERS), len(words))
    kind, rest = words[place : place + 1], words[place + 1 :]
    if kind == ["let"]:
        return set(_SET_BY_ARITHMETIC.findall(" ".join(rest)))
    if kind == ["printf"]:
        return set(rest[1:2]) if rest[:1] == ["-v"] else set()
    return set(rest[:1] if kind in (["for"], ["select"]) else rest)


def _assign(script: Script, found: re.Match[str], raw: str, *, is_certain: bool) -> None:
    name, values = found[1], script.variables
    if not is_certain:
        if name in values:
            script.set_again.add(name)
        return
    is_array = raw.startswith("(")
    value = " ".join(_expanded(script, _tokens(raw[1:-1]))) if is_array else _substitute(script, raw)
    if found[2] and name in values:
        value = f"{values[name]} {value}" if is_array else values[name] + value
    values[name] = value
    _count(script, values[name])


def _expanded(script: Script, words: Iterable[str]) -> Iterator[str]:
    """Words with their variables substituted; those that hold flags are split."""
    names_file = False
    for raw in words:
        is_file, names_file = names_file, False
        if is_file or raw in _OPERATORS:
            continue
        if _REDIRECTION.match(raw):
            names_file = raw.endswith(("<", ">"))
            continue
        value = _substitute(script, raw)
        if _FLAG_INSIDE.search(value):
            yield from (part.strip("'\"") for part in value.split())
        elif value or not raw.startswith("$"):
            yield value


def _substitute(script: Script, raw: str, depth: int = 0) -> str:
    """Value of a word as it is written, without its quotes."""
    parts: list[str] = []
    place, in_quotes = 0, False
    while place < len(raw):
        at = raw[place]
        if at == '"':
            in_quotes = not in_quotes
            place += 1
            continue
        if at == "'" and in_quotes:
            parts.append(at)
            place += 1
            continue
        end = _end_of(raw, place)
        named = _NAMED.match(raw, place)
        if at == "\\":
            parts.append(raw[place + 1 : end])
        elif at == "'":
            parts.append(raw[place + 1 : end - 1])
        elif at == "`":
            parts.append(_command(raw[place + 1 : end - 1]))
        elif raw.startswith("$((", place):
            parts.append(_arithmetic(script, raw[place + 3 : end - 2]))
        elif raw.startswith("$(", place):
            parts.append(_command(raw[place + 2 : end - 1]))
        elif raw.startswith("${", place):
            parts.append(_braced(script, raw[place + 2 : end - 1], depth))
        elif named:
            end = named.end()
            parts.append(_value(script, named[1]))
        else:
            parts.append(raw[place:end])
        place = end
    value = "".join(parts)
    _count(script, value)
    return value


def _value(script: Script, name: str) -> str:
    script.used.add(name)
    return script.variables.get(name, f"${name}")


def _braced(script: Script, inside: str, depth: int) -> str:
    """Value of ``${inside}``; forms that change a value are not known."""
    found = _BRACED.fullmatch(inside)
    if found is None or depth > _MAX_NESTING:
        return "${" + "".join(inside.split()) + "}"
    name, operator, default = found.groups()
    script.used.add(name)
    value = script.variables.get(name, "")
    if operator is None:
        return _value(script, name)
    if not value:
        value = _substitute(script, default, depth + 1)
        if operator == "=":
            script.variables[name] = value
    return value


def _command(text: str) -> str:
    """A command whose output is not known, by its first word."""
    return f"$({(text.split() or [''])[0]})"


def _arithmetic(script: Script, text: str) -> str:
    """Value of an expression of integers; the expression itself if it is not known."""
    values = _NAME.sub(lambda found: _value(script, found[1]), text.replace("{", "").replace("}", ""))
    try:
        return str(literal(ast.parse(values.strip().replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return f"$(({''.join(values.split())}))"


def _count(script: Script, value: str) -> None:
    script.num_characters += len(value)
    if script.num_characters > _MAX_CHARACTERS:
        raise ConfigError("variables of the file grow without end; write the arguments out")
