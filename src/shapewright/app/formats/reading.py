"""Result of reading a file of another project, and helpers that its readers share."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from shapewright.core.errors import ConfigError, MissingExtraError, short_repr
from shapewright.core.numeric import round_up
from shapewright.core.ranges import read_integer
from shapewright.core.records import dataclass

_MAX_EXPONENT = 64
_MAX_BASE = 2**32
_MAX_NESTING = 50
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Content of a file.

    Attributes:
        format: Name of the format.
        fields: Fields of TransformerConfig; empty where the file describes no model.
        model: Name or path of the model that the file starts; empty without one.
        workload: Fields of Workload.
        layout: Fields of ParallelLayout.
        passes: Micro-batches of each replica per step, where the file says them and not the global batch; 0 otherwise.
        guesses_replicas: Whether ``data_parallel`` is that of one micro-batch per replica and step, which the file does
            not say: its trainer computes their number from the batch and the devices.
        vocab_multiple: What the trainer pads the vocabulary to, per tensor-parallel device; 0 for none.
        untimed: ``rotary_base`` and ``norm_epsilon``, which no prediction depends on.
        unread: Keys of the file that were not read, by name.
    """

    format: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    workload: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    passes: int = 0
    guesses_replicas: bool = False
    vocab_multiple: int = 0
    untimed: Mapping[str, float] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def parts(self, **layout: Any) -> dict[str, Any]:
        """Keywords of ``shapewright.predict`` and the other functions: ``overrides``, ``workload`` and ``layout``.

        Args:
            layout: Fields of the layout that come on top of the file's, such as ``data_parallel``.
        """
        whole = {**self.layout, **layout}
        workload = with_global_batch(self.workload, whole, self.passes)
        fields = with_padded_vocabulary(self.fields, whole, self.vocab_multiple)
        return {"overrides": fields, "workload": workload, "layout": whole}


def with_global_batch(workload: Mapping[str, Any], layout: Mapping[str, Any], passes: int) -> dict[str, Any]:
    """Fields of a workload with the global batch that follows from its micro-batches, unless it is given.

    Args:
        passes: Micro-batches of each replica per step; 0 where they are not known.

    >>> with_global_batch({"micro_batch_size": 4}, {"data_parallel": 8}, 4)
    {'micro_batch_size': 4, 'global_batch_size': 128}
    """
    micro_batch = workload.get("micro_batch_size")
    if not passes or not micro_batch or workload.get("global_batch_size") is not None:
        return dict(workload)
    return {**workload, "global_batch_size": micro_batch * passes * layout.get("data_parallel", 1)}


def with_padded_vocabulary(fields: Mapping[str, Any], layout: Mapping[str, Any], multiple: int) -> dict[str, Any]:
    """Fields of a model with the vocabulary that a trainer runs.

    Args:
        multiple: What it pads the vocabulary to, per tensor-parallel device; 0 for none.

    >>> with_padded_vocabulary({"vocab_size": 50257}, {"tensor_parallel": 2}, 128)
    {'vocab_size': 50432}
    """
    if not multiple or not fields.get("vocab_size"):
        return dict(fields)
    return {**fields, "vocab_size": round_up(fields["vocab_size"], multiple * layout.get("tensor_parallel", 1))}


class Values:
    """Values of a file by key, which remember those that were read.

    Args:
        values: Values by key; hyphens of keys become underscores.

    Raises:
        ConfigError: a part of a file is no object with keys.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{short_repr(values)} stands where an object with keys belongs; give names and values")
        self._values = {str(key).replace("-", "_"): value for key, value in values.items()}
        self._read: set[str] = set()

    def get(self, *keys: str, default: Any = None) -> Any:
        """Value of the first key that is there and not null.

        Raises:
            ConfigError: it has a variable or a command of a shell script whose value the script does not say.
        """
        self._read.update(keys)
        key = next((key for key in keys if self._values.get(key) is not None), "")
        value = self._values[key] if key else default
        if _is_open(value):
            raise ConfigError(
                f"{key}={short_repr(value)} has no value in the file, where conditions are not evaluated and commands "
                f"are not run; write its value into the file"
            )
        return value

    def number(self, *keys: str, default: Any = None) -> Any:
        """The same as a number, also where the file has it as text.

        Raises:
            ConfigError: it is none.
        """
        value = self.get(*keys, default=default)
        if value is None or isinstance(value, int | float):
            return value
        try:
            found = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{keys[0]}={short_repr(value)} is not a number; write its value into the file, or give the field"
            ) from None
        return int(found) if found.is_integer() and "." not in str(value) and "e" not in str(value) else found

    def count(self, key: str, *, default: int | None = None) -> int | None:
        """A whole number, also before the name of a script; None for any other value, which counts as unread."""
        if self._values.get(key) is None:
            return default
        value = read_integer(str(self._values[key]).partition(" ")[0])
        if value is not None:
            self._read.add(key)
        return value

    def flag(self, *keys: str, default: bool = False) -> bool:
        """Whether any of the keys is true; a switch of a list of arguments is, also before a variable."""
        self._read.update(keys)
        found = [self._values[key] for key in keys if self._values.get(key) is not None]
        return any(map(_is_true, found)) if found else default

    def pick(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Numbers by our names, of the keys that are there."""
        pairs = [(ours, self.number(theirs)) for theirs, ours in names.items()]
        return {name: value for name, value in pairs if value is not None}

    def skip(self, *keys: str) -> None:
        """Count keys as read whose values have no effect."""
        self._read.update(keys)

    def skip_if(self, key: str, *values: object) -> None:
        """Count a key as read if it has one of some values, which have no effect."""
        if self._values.get(key) in values:
            self._read.add(key)

    def unread(self) -> tuple[str, ...]:
        """Keys that are there and were not read, and what may hold more of them."""
        unread = {key: value for key, value in self._values.items() if key not in self._read and value is not None}
        texts = [f"{key}={value}" if _is_open(value) else key for key, value in unread.items()]
        # A switch has no value: the word after it is an argument of its own.
        after = [value for key, value in self._values.items() if key in self._read and _is_open(value)]
        return tuple(sorted((*texts, *after)))


def _is_open(value: object) -> bool:
    """Whether a value has a variable or a command of a shell script."""
    return isinstance(value, str) and "$" in value


def _is_true(value: object) -> bool:
    if not isinstance(value, str):
        return bool(value)
    return _is_open(value) or value.strip().lower() in ("true", "1", "yes")


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp16": "fp16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}
"""Element formats by the words of trainers."""


def literal(node: ast.expr, depth: int = 0) -> Any:
    """Value of an expression of literals and arithmetic on numbers, without running it.

    >>> literal(ast.parse("5 * 8", mode="eval").body)
    40

    Raises:
        ValueError: it has names, calls or anything else.
    """
    if depth > _MAX_NESTING:
        raise ValueError("nested too deeply")
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = literal(node.left, depth + 1), literal(node.right, depth + 1)
        if not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise ValueError("arithmetic on something else than numbers")
        # Powers of powers would have numbers without end.
        if isinstance(node.op, ast.Pow) and (abs(right) > _MAX_EXPONENT or abs(left) > _MAX_BASE):
            raise ValueError("a power that is too large")
        try:
            return _OPERATORS[type(node.op)](left, right)
        except ArithmeticError as error:
            raise ValueError(str(error)) from None
    return ast.literal_eval(node)


def read_zero(zero: object) -> dict[str, int]:
    """ZeRO stage of a ``zero_optimization`` section."""
    return {"zero_stage": Values(zero).number("stage", default=0)} if isinstance(zero, Mapping) else {}


def read_replicas(workload: Mapping[str, Any], passes: int) -> dict[str, int]:
    """Data-parallel degree that follows from the global batch and the micro-batches of each replica."""
    batch, micro_batch = workload.get("global_batch_size"), workload.get("micro_batch_size")
    return {"data_parallel": max(1, batch // (micro_batch * passes))} if batch and micro_batch else {}


def parse_python(text: str) -> ast.Module:
    """Parse a Python file without running it.

    Raises:
        ConfigError: it is not valid Python.
    """
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"the file is not valid Python: {short_repr(str(error))}; check its end") from None


def parse_yaml(text: str) -> dict[str, Any]:
    """Parse a YAML or JSON object; aliases, which can expand without end, are refused.

    Raises:
        ConfigError: it is none.
        MissingExtraError: it is not JSON, and PyYAML is not installed.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = _load_yaml(text)
    if not isinstance(found, dict):
        raise ConfigError("the file does not hold an object with keys; give a config file")
    return found


_YAML_STARTS = ("[", "{", "<block mapping start>", "<block sequence start>")
_YAML_ENDS = ("]", "}", "<block end>")


def _load_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError(
            "reading YAML needs PyYAML, which is not installed; run pip install 'shapewright[yaml]'"
        ) from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        for token in yaml.scan(text, Loader=loader):
            if isinstance(token, yaml.AliasToken):
                raise ConfigError("the file has YAML aliases, which are not read; write the values out")
            depth += token.id in _YAML_STARTS
            depth -= token.id in _YAML_ENDS
            if depth > _MAX_NESTING:
                raise ConfigError(f"the file nests deeper than {_MAX_NESTING} levels; give a config file")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        words = " ".join(str(error).split())[:150]
        raise ConfigError(f"the file is not valid YAML: {words}; check that it is complete") from None
