"""Proxy runs to train: a shape, a recipe and a number of tokens each, read from a csv or jsonl file."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import BenchError, ShapewrightError, close_names, short_path, short_repr
from shapewright.core.files import read_start
from shapewright.core.ranges import check_integer, check_number
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.core.units import parse_count
from shapewright.measure.proxy.text import VOCAB_SIZE
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.models.transformer import FIELD_NAMES, TransformerConfig
from shapewright.prediction.model_runs import ProxyRun, proxy_run
from shapewright.prediction.training_run import MOST_TOKENS
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable

# A run without ``config`` is a decoder of the Llama family.
_FAMILY: Mapping[str, Any] = {
    "norm": "rmsnorm", "activation": "silu", "gated_mlp": True, "fused_qkv": True, "fused_gate_up": True,
}  # fmt: skip
# Proxy models see most of their text once, so dropout would only cost loss.
_FIXED = {"vocab_size": VOCAB_SIZE, "hidden_dropout": 0.0, "attention_dropout": 0.0}
# Tokens per parameter of compute-optimal training. Source: Hoffmann et al. 2022, arXiv 2203.15556, table 3.
_TOKENS_PER_PARAMETER = 20.0
_MAX_FILE_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class ProxyRecipe:
    """How a proxy model is trained; models to be compared share it.

    Attributes:
        seq_len: Tokens per sequence.
        batch_tokens: Tokens of one optimizer step; a multiple of seq_len.
        micro_batch_size: Sequences of one pass, whose gradients are added up; 0 for the whole batch.
        learning_rate: Peak learning rate of Adam for a matrix with fan-in 256; that of other matrices is scaled by
            256 / fan-in (arXiv 2203.03466, table 8), that of vectors and embeddings is not scaled.
        warmup_fraction: Share of the steps with a linearly rising learning rate.
        final_fraction: Learning rate at the end of the cosine over the peak.
        weight_decay: Weight decay of matrices per step, over the unscaled learning rate.

    Raises:
        BenchError: a value is out of range.
    """

    seq_len: int = 256
    batch_tokens: int = 2048
    micro_batch_size: int = 0
    learning_rate: float = 1e-3
    warmup_fraction: float = 0.05
    final_fraction: float = 0.1
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        for name, low, high in (("seq_len", 1, 2**27), ("batch_tokens", 1, 2**31), ("micro_batch_size", 0, 2**20)):
            check_integer(name, getattr(self, name), low, high, error=BenchError)
        check_number("learning_rate", self.learning_rate, 1e-9, 10.0, error=BenchError)
        for name, most in (("warmup_fraction", 1.0), ("final_fraction", 1.0), ("weight_decay", 10.0)):
            check_number(name, getattr(self, name), 0.0, most, error=BenchError)
        if self.batch_tokens % self.seq_len:
            raise BenchError(
                f"batch_tokens={self.batch_tokens} must be a multiple of seq_len={self.seq_len}; try "
                f"{max(1, round(self.batch_tokens / self.seq_len)) * self.seq_len}"
            )

    @property
    def batch_size(self) -> int:
        """Sequences of one optimizer step."""
        return self.batch_tokens // self.seq_len


_WORKLOAD_FIELDS = ("seq_len", "micro_batch_size")
_RECIPE_FIELDS = tuple(spec.name for spec in fields(ProxyRecipe))
_OTHER_COLUMNS = ("config", "train_tokens", "tokens_per_parameter")


@dataclass(frozen=True, kw_only=True)
class ProxySpec:
    """One proxy model to train.

    Attributes:
        config: The model, with a vocabulary of bytes.
        num_steps: Optimizer steps.
        recipe: How it is trained.
    """

    config: TransformerConfig
    num_steps: int
    recipe: ProxyRecipe

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.config.title

    @property
    def train_tokens(self) -> int:
        """Tokens of the whole run."""
        return self.num_steps * self.recipe.batch_tokens

    @cached_property
    def num_parameters(self) -> int:
        """Parameters outside the embeddings and the logit matrix."""
        return count_body_parameters(self.config)

    def workload(self, dtype: str) -> Workload:
        """One pass of a step."""
        size = self.recipe.micro_batch_size or self.recipe.batch_size
        return Workload(micro_batch_size=min(size, self.recipe.batch_size), seq_len=self.recipe.seq_len, dtype=dtype)

    def run(self, dtype: str, text: str, step: int) -> ProxyRun:
        """Identity of the loss after a step, as it is stored.

        Args:
            text: Digest of the text.
        """
        recipe = {name: value for name, value in asdict(self.recipe).items() if name not in _WORKLOAD_FIELDS}
        trained = {"trained_tokens": step * self.recipe.batch_tokens, "train_tokens": self.train_tokens}
        return proxy_run(self.config, self.workload(dtype), {**recipe, **trained, "text": text})


def count_body_parameters(config: TransformerConfig) -> int:
    """Parameters of a model outside its embeddings and logit matrix."""
    counts = count_parameters(config)
    return counts.total - counts.embedding - counts.head


def read_runs(path: str | Path) -> list[ProxySpec]:
    """Read the runs of a file: csv with a header, or one JSON object per line (.jsonl).

    Columns: fields of TransformerConfig; ``config`` (a preset, config.json or hub id that the fields change; without it
    a decoder of the Llama family); ``train_tokens`` or ``tokens_per_parameter`` (default 20, of the parameters outside
    the embeddings); and the fields of ProxyRecipe. Empty cells take the default. The vocabulary is that of bytes.

    Raises:
        BenchError: the file cannot be read, or a run of it is malformed; the message names the line.
        ConfigError: a model's fields contradict each other.
    """
    where = Path(path)
    try:
        content = read_start(where, _MAX_FILE_BYTES + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BenchError(f"{short_path(where)} is not UTF-8 text; give a csv or jsonl file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BenchError(f"cannot read {short_path(where)}: {reason}; give a csv or jsonl file of runs") from error
    if len(content) > _MAX_FILE_BYTES:
        raise BenchError(f"{short_path(where)} is larger than {_MAX_FILE_BYTES // 2**20} MiB; a run is one line")
    lines = _jsonl_lines(text, where) if where.suffix in (".jsonl", ".ndjson") else _csv_lines(text, where)
    specs: list[ProxySpec] = []
    for number, values in lines:
        try:
            specs.append(make_spec(values))
        except ShapewrightError as error:
            raise type(error)(f"{short_path(where)}, line {number}: " + error.text) from None
    if not specs:
        raise BenchError(
            f"{short_path(where)} has no runs; write a line of field names and a line for each run, as 'search "
            f"--experiments' does"
        )
    _require_distinct(specs, where)
    return specs


def make_spec(values: Mapping[str, Any]) -> ProxySpec:
    """Make a run from its columns; see read_runs.

    Raises:
        BenchError: an unknown column, or a value out of range.
        ConfigError: the model's fields contradict each other.
    """
    given = {name: value for name, value in values.items() if value is not None and value != ""}
    known = (*_OTHER_COLUMNS, *_RECIPE_FIELDS, *FIELD_NAMES)
    for name in given:
        if name not in known:
            raise BenchError(f"unknown column {short_repr(name)}; {close_names(str(name), known) or 'see the help'}")
    shape = {name: value for name, value in given.items() if name in FIELD_NAMES}
    source = given.get("config")
    if source is None:
        shape = {**_FAMILY, **shape}
    config = read_model(source, {**shape, **_FIXED}).config
    if "name" not in given and source is None:
        config = replace(config, name=f"h{config.hidden_size}-l{config.num_layers}")
    recipe = ProxyRecipe(**{name: value for name, value in given.items() if name in _RECIPE_FIELDS})
    if "train_tokens" in given and "tokens_per_parameter" in given:
        raise BenchError(with_fields("{train_tokens} and tokens_per_parameter are given"), advice="give one of them")
    ratio = given.get("tokens_per_parameter", _TOKENS_PER_PARAMETER)
    tokens: Any = given.get("train_tokens")
    if isinstance(tokens, str):
        with suppress(ValueError):  # what is no count is refused below
            tokens = parse_count(tokens)
    for name, value in (("train_tokens", tokens), ("tokens_per_parameter", ratio)):
        if value is not None:
            check_number(name, value, 0.0, MOST_TOKENS, error=BenchError, exclude_low=True)
    wanted = ratio * count_body_parameters(config) if tokens is None else tokens
    check_number("train_tokens", wanted, 0.0, MOST_TOKENS, error=BenchError)
    return ProxySpec(config=config, num_steps=max(1, round(wanted / recipe.batch_tokens)), recipe=recipe)


def _csv_lines(text: str, where: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    try:
        for values in reader:
            if None in values or None in values.values():
                raise BenchError(
                    f"{short_path(where)}, line {reader.line_num}: the header has {len(reader.fieldnames or ())} "
                    "columns, and this line has another number of them"
                )
            yield reader.line_num, {name.strip(): _parse(value.strip()) for name, value in values.items()}
    except csv.Error as error:
        raise BenchError(f"{short_path(where)}, line {reader.line_num + 1} is not csv ({error}); correct it") from None


def _jsonl_lines(text: str, where: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                values = json.loads(line)
            except (json.JSONDecodeError, RecursionError, ValueError) as error:
                raise BenchError(f"{short_path(where)}, line {number} is not JSON ({error}); give an object") from None
            if not isinstance(values, dict):
                raise BenchError(f"{short_path(where)}, line {number} is not a JSON object; give one run per line")
            yield number, values


def _parse(cell: str) -> Any:
    """Value of a csv cell: a number, true, false or text."""
    if cell.lower() in ("true", "false"):
        return cell.lower() == "true"
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def _require_distinct(specs: list[ProxySpec], where: Path) -> None:
    """Check that no run is listed twice, even under another name."""
    seen: dict[str, int] = {}
    for place, spec in enumerate(specs, start=1):
        run = spec.run("fp32", "", spec.num_steps)
        identity = json.dumps([run.config, run.workload, run.training], sort_keys=True)
        if identity in seen:
            raise BenchError(
                f"{short_path(where)}: runs {seen[identity]} and {place} are the same; leave one out, and set the "
                "number of seeds instead"
            )
        seen[identity] = place
