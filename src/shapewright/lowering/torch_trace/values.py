"""Values and sizes that meta tensors do not have: given by line, or those of a router that chooses evenly.

A mixture written in plain PyTorch finds the tokens of each expert by comparing the chosen indices with its number, or
counts them; the meta device has no values to compare. What a tensor holds is known here from the operators that made
it: indices chosen among N options, masks of which a share is set, counts of a mean, rows in order, random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.core.errors import TraceError
from shapewright.core.texts import with_fields
from shapewright.lowering.torch_trace.dispatched import is_meta
from shapewright.lowering.torch_trace.errors import user_line

if TYPE_CHECKING:
    from shapewright.lowering.torch_trace.storages import Storages

# Values that meta tensors do not have: .item(), the truth of a tensor, and results whose size depends on values.
READS_VALUE = {"_local_scalar_dense", "is_nonzero", "item"}
SIZED_BY_VALUES = {
    "nonzero", "masked_select", "bincount", "unique", "_unique2", "unique_consecutive", "unique_dim",
}  # fmt: skip

_CHOICE_NOTE = "experts are taken to get equal numbers of tokens where sizes depend on their choice"
_RANDOM_NOTE = (
    "comparisons with random numbers have their likelier outcome, in every step: a layer that is dropped in fewer than "
    "half of the steps runs"
)


class _Known(NamedTuple):
    """What a tensor holds.

    Attributes:
        kind: ``indices``, ``mask``, ``counts``, ``rows``, or ``random`` for numbers between 0 and 1.
        value: Options of indices, share of a mask that is set, mean of counts or of random numbers.
        hits: Share of the options in the last dimension that are chosen at all.
        note: What is assumed where it decides.
    """

    kind: str
    value: float = 0.0
    hits: float = 1.0
    note: str = _CHOICE_NOTE


_CHOOSING = {"topk", "sort", "argsort", "argmax", "argmin", "multinomial"}
_COMPARING = {"eq", "ne", "gt", "ge", "greater", "not_equal"}
_RANDOM = {"rand", "rand_like"}
_BELOW, _ABOVE = {"lt", "le"}, {"gt", "ge"}
_KEEPING = {"_to_copy", "clone", "index", "copy", "index_select", "masked_fill", "where"}
_NEGATING = {"logical_not", "bitwise_not"}


class _Choices:
    """What is known of tensors by their storage."""

    def __init__(self, storages: Storages) -> None:
        """Start with nothing known."""
        self._storages = storages
        self._known: dict[int, _Known] = {}

    def of(self, tensor: Any) -> _Known | None:
        """What a tensor is known to hold."""
        return self._known.get(self._storages.serial_of(tensor)) if hasattr(tensor, "untyped_storage") else None

    def observe(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Note what the result of an operator holds."""
        if name in _CHOOSING:
            if args[0].is_floating_point():
                indices = result[1] if isinstance(result, tuple) else result
                self._note(indices, _Known("indices", self._num_options(name, args)))
            return
        if name in _RANDOM:
            self._note(result, _Known("random", 0.5, note=_RANDOM_NOTE))
            return
        known = next(filter(None, map(self.of, args[:3])), None) if self._known else None
        if known is None or not hasattr(result, "untyped_storage"):
            return
        found = self._follow(name, known, args, result)
        if found is not None:
            self._note(result, found)

    def num_rows(self, name: str, tensor: Any) -> int | None:
        """Rows of ``nonzero``, ``unique`` or ``bincount`` of a tensor, or that a mask selects; None if unknown."""
        known = self.of(tensor)
        if known is None:
            return None
        if known.kind == "indices":
            return int(known.value) if name in ("unique", "bincount") else None
        return max(1, round(known.value * tensor.numel())) if known.kind == "mask" else None

    def note_rows(self, tensor: Any) -> None:
        """Note that a tensor holds the numbers of the first rows in order."""
        self._note(tensor, _Known("rows"))

    def value_of(self, tensor: Any) -> float | bool | None:
        """Value of a tensor with one element; None if unknown."""
        known = self.of(tensor)
        if known is None or known.kind == "indices":
            return None
        if known.kind == "random":
            return known.value
        if known.kind == "rows":
            return int(tensor.storage_offset())
        return known.value >= 0.5 if known.kind == "mask" else round(known.value)

    def counts_of(self, tensor: Any) -> Any:
        """Counts as a tensor with values, whose sum is that of the counts; None if unknown."""
        import torch

        known = self.of(tensor)
        if known is None or known.kind != "counts" or tensor.dim() != 1:
            return None
        num_options = tensor.numel()
        total = round(known.value * num_options)
        even = [total * (one + 1) // num_options - total * one // num_options for one in range(num_options)]
        return torch.tensor(even, dtype=tensor.dtype, device="cpu")

    def _note(self, tensor: Any, known: _Known) -> None:
        self._known[self._storages.serial_of(tensor)] = known

    @staticmethod
    def _num_options(name: str, args: Sequence[Any]) -> int:
        """Size of the dimension that indices are chosen from."""
        position = 2 if name == "topk" else 1
        has_dim = name != "multinomial" and len(args) > position and isinstance(args[position], int)
        shape = args[0].shape
        if name in ("argmax", "argmin") and not has_dim:
            return prod(shape)
        return int(shape[args[position] if has_dim else -1]) if shape else 1

    def _follow(self, name: str, known: _Known, args: Sequence[Any], result: Any) -> _Known | None:
        """What the result holds of an operator that reads a known tensor."""
        kind, value, hits, _ = known
        if kind == "random":
            limit = args[1] if len(args) > 1 else None
            if name in _BELOW | _ABOVE and isinstance(limit, int | float):
                share = min(max(float(limit), 0.0), 1.0)
                return known._replace(kind="mask", value=share if name in _BELOW else 1.0 - share)
            return known if name in _KEEPING else None
        if kind == "indices":
            if name in ("eq", "ne"):
                classes = args[1].shape[-1] if getattr(args[1], "dim", int)() else 1
                is_each = classes > 1 and result.shape[-1] == classes  # compared with the number of each option
                share = 1.0 / value if name == "eq" else 1.0 - 1.0 / value
                return _Known("mask", share, min(1.0, value / classes) if is_each else 1.0)
            if name in ("histc", "bincount") and result.dim() == 1:
                size = result.numel()
                return _Known("counts", args[0].numel() / size, min(1.0, value / size))
            if name in ("scatter", "scatter_"):
                return _Known("mask", args[2].numel() / max(result.numel(), 1))
            return known if name in (*_KEEPING, "flatten") else None
        if kind == "mask":
            mean = value * args[0].numel() / max(result.numel(), 1)
            if name == "any":
                return known._replace(value=min(hits, mean), hits=1.0)
            if name == "sum":
                return known._replace(kind="counts", value=mean, hits=min(hits, mean))
            if name in _NEGATING:
                return known._replace(value=1.0 - value, hits=1.0)
            return known if name in (*_KEEPING, *_COMPARING) else None
        if kind == "counts" and name in _COMPARING:
            return known._replace(kind="mask", value=1.0 - hits if name == "eq" else hits, hits=1.0)
        return known if name in _KEEPING else None


class Values:
    """Values of tensors that the control flow of a module depends on."""

    def __init__(
        self, storages: Storages, notes: dict[str, None], *, given: Mapping[str, int], assumes_values: bool
    ) -> None:
        """Start with the values that are given.

        Args:
            storages: Storages of the trace.
            notes: Notes of the trace, to which assumptions are added.
            given: Value that a tensor has, or number of rows that a selection has, by line (``file.py:12``).
            assumes_values: Whether a value that is not given is taken as 1 or true instead of refused.
        """
        self._choices = _Choices(storages)
        self._notes = notes
        self._values = dict(given)
        self._used: set[str] = set()
        self._assumes_values = assumes_values
        self.observe = self._choices.observe

    @property
    def unused(self) -> list[str]:
        """Lines whose value was given, but not asked for."""
        return [line for line in self._values if line not in self._used]

    def _given(self, line: str) -> int | None:
        """Value that is given for a line."""
        self._used.add(line)
        return self._values.get(line)

    def counts_of(self, tensor: Any) -> Any:
        """Counts as a tensor with values, whose sum is that of the counts; None if unknown."""
        return self._assumed(tensor, self._choices.counts_of(tensor))

    def _assumed(self, tensor: Any, value: Any) -> Any:
        """The value, with a note on what is assumed unless a random comparison has one outcome alone."""
        known = self._choices.of(tensor)
        if value is not None and known is not None:
            is_certain = known.note == _RANDOM_NOTE and known.kind == "mask" and known.value in (0.0, 1.0)
            if not is_certain:
                self._notes[known.note] = None
        return value

    def value_of(self, tensor: Any) -> Any:
        """Value of a tensor with one element."""
        import torch

        line = user_line()
        given = self._given(line)
        if given is not None:
            return bool(given) if tensor.dtype == torch.bool else given
        chosen = self._assumed(tensor, self._choices.value_of(tensor))
        if chosen is not None:
            return chosen
        if self._assumes_values:
            return True if tensor.dtype == torch.bool else 1
        raise TraceError(
            f"{line}: control flow depends on the value of a tensor, which the meta device does not have",
            advice=with_fields(
                "give the value with {values} {line}=N, or pass it to the module as a number, such as "
                "{inputs:length=128}",
                line=line,
            ),
        )

    def _num_rows(self, name: str, tensor: Any) -> int:
        """Rows of a result whose size depends on the values of a tensor."""
        line = user_line()
        given = self._given(line)
        if given is not None:
            return given
        chosen = self._assumed(tensor, self._choices.num_rows(name, tensor))
        if chosen is not None:
            return int(chosen)
        raise TraceError(
            f"{line}: the size of the result of {name} depends on the values of a tensor, which the meta device does "
            "not have",
            advice=with_fields("give its number of rows with {values} {line}=ROWS", line=line),
        )

    def sized_result(self, name: str, args: Sequence[Any], *, num_returns: int) -> Any:
        """Result of an operator whose size depends on values."""
        import torch

        source = args[0]
        if name == "nonzero":
            rows = self._num_rows("nonzero", source)
            result: Any = torch.empty(rows, source.dim(), dtype=torch.int64, device="meta")
            if source.dim() == 1 and self._choices.of(source):
                self._choices.note_rows(result)
        elif name == "masked_select":
            result = torch.empty(self._num_rows("masked_select", args[1]), dtype=source.dtype, device="meta")
        elif name == "bincount":
            least = args[2] if len(args) > 2 else 0
            result = torch.empty(max(self._num_rows("bincount", source), least), dtype=torch.int64, device="meta")
            self.observe("bincount", args, result)
        else:
            rows = self._num_rows("unique", source)
            first = torch.empty(rows, dtype=source.dtype, device="meta")
            if self._choices.of(source):
                self._choices.note_rows(first)
            indices = torch.empty(source.shape, dtype=torch.int64, device="meta")
            result = (first, indices, torch.empty(rows, dtype=torch.int64, device="meta"))[:num_returns]
        return result

    def replace_masks(self, name: str, args: Sequence[Any]) -> Sequence[Any]:
        """Replace boolean masks of an indexing call by indices, whose number has to be given."""
        import torch

        if len(args) < 2 or not isinstance(args[1], list | tuple):
            return args
        masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8) and is_meta(one)]
        if not masks:
            return args
        if "put" in name and args[2].numel() == 1:
            # Every element may be written: the traffic is that of the whole tensor.
            rows = masks[0].numel()
        elif "put" in name:
            rows = args[2].shape[0] if args[2].dim() else 1
        else:
            rows = self._num_rows("indexing by a mask", masks[0])
        indices: list[Any] = []
        for one in args[1]:
            if one is None or one.dtype not in (torch.bool, torch.uint8):
                indices.append(one)
            else:
                indices += [torch.empty(rows, dtype=torch.int64, device="meta") for _ in range(one.dim())]
        return (args[0], indices, *args[2:])
