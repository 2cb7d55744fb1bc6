"""Values and sizes that meta tensors do not have: given by line, or those of a router that chooses evenly.

A mixture written in plain PyTorch finds the tokens of each expert by comparing the chosen indices with its number, or
counts them; the meta device has no values to compare. What a tensor holds is known here from the operators that made
it: indices chosen among N options, masks of which a share is set, counts of a mean, rows in order.
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

_NOTE = "experts are taken to get equal numbers of tokens where sizes depend on their choice"


class _Known(NamedTuple):
    """What a tensor holds.

    Attributes:
        kind: ``indices``, ``mask``, ``counts`` or ``rows``.
        value: Options of indices, share of a mask that is set, mean of counts.
        hits: Share of the options in the last dimension that are chosen at all.
    """

    kind: str
    value: float = 0.0
    hits: float = 1.0


_CHOOSING = {"topk", "sort", "argsort", "argmax", "argmin", "multinomial"}
_COMPARING = {"eq", "ne", "gt", "ge", "greater", "not_equal"}
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

    def value_of(self, tensor: Any) -> int | bool | None:
        """Value of a tensor with one element; None if unknown."""
        known = self.of(tensor)
        if known is None or known.kind == "indices":
            return None
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
        kind, value, hits = known
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
                return _Known("mask", min(hits, mean))
            if name == "sum":
                return _Known("counts", mean, min(hits, mean))
            if name in _NEGATING:
                return _Known("mask", 1.0 - value)
            return known if name in (*_KEEPING, *_COMPARING) else None
        if kind == "counts" and name in _COMPARING:
            return _Known("mask", 1.0 - hits if name == "eq" else hits)
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
        self._assumes_values = assumes_values
        self.observe = self._choices.observe

    def counts_of(self, tensor: Any) -> Any:
        """Counts as a tensor with values, whose sum is that of the counts; None if unknown."""
        return self._assumed(self._choices.counts_of(tensor))

    def _assumed(self, value: Any) -> Any:
        if value is not None:
            self._notes[_NOTE] = None
        return value

    def value_of(self, tensor: Any) -> Any:
        """Value of a tensor with one element."""
        import torch

        line = user_line()
        given = self._values.get(line)
        if given is not None:
            return bool(given) if tensor.dtype == torch.bool else given
        chosen = self._assumed(self._choices.value_of(tensor))
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
        given = self._values.get(line)
        if given is not None:
            return given
        chosen = self._assumed(self._choices.num_rows(name, tensor))
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
