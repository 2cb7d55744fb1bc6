"""A tensor parallel group spans several nodes, so every layer communicates over the network.

## What it does

Fires when `tensor_parallel` exceeds the node size or does not divide it, so that consecutive groups span two nodes.
Nodes of 6 GPUs (Summit) allow 1, 2, 3 and 6, of which 3 and 6 divide few published shapes.

## Why it is slow

Tensor parallelism communicates activations four times per layer. Inside a DGX A100 each GPU sends at 300 GB/s, between
nodes at 25 GB/s (data sheets). A degree of 4 in nodes of 6 splits every third group. For Summit, arXiv 2401.14489
therefore recommends widths divisible by 6.

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL108", tensor_parallel=16, num_heads=32, hidden_size=4096)
True

## Use instead

>>> fires("PL108", tensor_parallel=8, num_heads=32, hidden_size=4096)
False

## Fix safety

`runtime`. A smaller degree needs more memory per device; suggestions are checked to fit.

## When it does not matter

Where a rank file places each group inside one node and leaves the remaining devices idle. Fast domains larger than a
server (NVL72, TPU pods) count as one node in the device file.

## References

- arXiv 2104.04473, section 3 (takeaway 1: tensor parallelism up to the size of a node).
- arXiv 2401.14489, section on 6-GPU nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.core.numeric import divisors
from shapewright.lint.layout_fixes import tensor_parallel_fix
from shapewright.lint.rule import Fix, Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find tensor parallel groups that span several nodes."""
    t, node_size = scenario.layout.tensor_parallel, scenario.device.node_size
    if t == 1 or node_size % t == 0:
        return
    if t > node_size:
        problem = f"is more than the {node_size} devices of a node"
    else:
        problem = f"does not divide the {node_size} devices of a node, so groups span two nodes"
    yield Violation(
        field="layout.tensor_parallel",
        actual=t,
        wanted=f"one of {', '.join(map(str, divisors(node_size)))}",
        problem=problem,
        fixes=tuple(_list_fixes(scenario)),
        severity="warning",
    )


def _list_fixes(scenario: Scenario) -> Iterator[Fix]:
    for degree in reversed(divisors(scenario.device.node_size)):
        fix = tensor_parallel_fix(scenario, degree)
        if fix:
            yield fix


RULE = Rule(
    code="PL108",
    name="tensor-group-across-nodes",
    since="0.1.0",
    reads=("layout.tensor_parallel", "device.node_size"),
    check=check,
)
