"""A tensor parallel group reaches over the edge of a node, so that every layer waits for the network.

## What it does

Fires when `tensor_parallel` is larger than a node, or does not divide it: then groups that are laid out one after the
other straddle two nodes. Nodes of 6 GPUs (Summit) allow 1, 2, 3 and 6, which few published shapes divide by.

## Why it is slow

Tensor parallelism sends activations four times per layer. Inside a DGX A100 each GPU sends at 300 GB/s, between nodes
at 25 GB/s (data sheets). Degrees of 4 in nodes of 6 leave every third group split. On Summit, arXiv 2401.14489
therefore asks for widths divisible by 6.

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL108", tensor_parallel=16, num_heads=32, hidden_size=4096)
True

## Use instead

>>> fires("PL108", tensor_parallel=8, num_heads=32, hidden_size=4096)
False

## Fix safety

`runtime`. A smaller degree needs more memory on each device; suggestions fit.

## When it does not matter

Where a rank file puts each group inside one node and leaves the remaining devices idle. Links that join more than the
reference node (NVL72, TPU pods) are in the device's file as its node.

## References

- arXiv 2104.04473, section 3 (takeaway 1: tensor parallelism up to the size of a node).
- arXiv 2401.14489, section on 6-GPU nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.integers import divisors
from shapewright.lint.batches import with_tensor_parallel
from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for tensor parallel groups that do not stay inside a node."""
    t, node_size = case.layout.tensor_parallel, case.device.node_size
    if t == 1 or node_size % t == 0:
        return
    if t > node_size:
        problem = f"is more than the {node_size} devices of a node"
    else:
        problem = f"does not divide the {node_size} devices of a node, so that groups straddle two"
    yield Violation(
        field="layout.tensor_parallel",
        actual=t,
        wanted=f"one of {', '.join(map(str, divisors(node_size)))}",
        problem=problem,
        repairs=tuple(_repairs(case)),
        severity="warning",
    )


def _repairs(case: WhatIf) -> Iterator[Repair]:
    for degree in reversed(divisors(case.device.node_size)):
        repair = with_tensor_parallel(case, degree)
        if repair:
            yield repair


RULE = Rule(
    code="PL108",
    name="tensor-group-across-nodes",
    since="0.1.0",
    reads=("layout.tensor_parallel", "device.node_size"),
    check=check,
)
