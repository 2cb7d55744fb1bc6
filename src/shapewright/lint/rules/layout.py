"""Rules on the degrees of a parallel layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shapewright.core.numeric import divisors
from shapewright.lint.layout_fixes import effective_global_batch, smaller_degree_fixes, tensor_parallel_fix
from shapewright.lint.rule import Fix, Violation, rule
from shapewright.lint.shape_fixes import can_change_depth, nearest_multiples
from shapewright.lowering.operations.collective import Collective

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


@rule(
    "PL105",
    "tensor-parallel-too-large",
    reads=("layout.tensor_parallel", "layout.data_parallel", "workload.global_batch_size"),
)
def tensor_parallel_too_large(scenario: Scenario) -> Iterator[Violation]:
    """Tensor parallelism is larger than memory requires, and adds communication to every layer.

    ## What it does

    Training only. Fires when a smaller `tensor_parallel` on the same devices, with more replicas, fits in memory and is
    predicted to take less time per token at the same global batch.

    ## Why it is slow

    Each layer communicates its activations over the tensor axis four times per micro-batch, and GEMMs of 1/t of the
    width are less efficient. A 182 B model on 384 A100 ran at 125 TFLOP/s with 8-way and at 156 with 4-way tensor
    parallelism (and twice the pipeline stages; topology log of BLOOM).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("PL105", tensor_parallel=4, num_layers=4)
    True

    ## Use instead

    >>> fires("PL105", tensor_parallel=1, num_layers=4)
    False

    ## Fix safety

    `runtime`. Memory is an estimate: test the step before a long run.

    ## When it does not matter

    In prefill and decode, where tensor parallelism reduces the time to the first or next token.

    ## References

    - arXiv 2401.14489, rule 5; stas00/ml-engineering, "Final recommendations for sizing".
    """
    t = scenario.layout.tensor_parallel
    if t == 1 or not scenario.workload.is_training or not scenario.fits:
        return
    fixes = smaller_degree_fixes(scenario, largest=t)
    if fixes:
        yield Violation(
            field="layout.tensor_parallel",
            actual=t,
            wanted="the smallest that fits",
            problem="is larger than memory requires",
            fixes=fixes,
            only_best=True,
        )


@rule("PL108", "tensor-group-across-nodes", reads=("layout.tensor_parallel", "device.node_size"))
def tensor_group_across_nodes(scenario: Scenario) -> Iterator[Violation]:
    """A tensor parallel group spans several nodes, so every layer communicates over the network.

    ## What it does

    Fires when `tensor_parallel` exceeds the node size or does not divide it, so that consecutive groups span two nodes.
    Nodes of 6 GPUs (Summit) allow 1, 2, 3 and 6, of which 3 and 6 divide few published shapes. The reported time is at
    most that of the axis's communication: a smaller degree also makes the work of each device more efficient.

    ## Why it is slow

    Tensor parallelism communicates activations four times per layer. Inside a DGX A100 each GPU sends at 300 GB/s,
    between nodes at 25 GB/s (data sheets). A degree of 4 in nodes of 6 splits every third group. For Summit, arXiv
    2401.14489 therefore recommends widths divisible by 6.

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

    Where a rank file places each group inside one node and leaves the remaining devices idle. Fast domains larger than
    a server (NVL72, TPU pods) count as one node in the device file.

    ## References

    - arXiv 2104.04473, section 3 (takeaway 1: tensor parallelism up to the size of a node).
    - arXiv 2401.14489, section on 6-GPU nodes.
    """
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
        fixes=tuple(_degrees_in_node(scenario)),
        least_severity="warning",
        max_cost_fraction=_communication_fraction(scenario),
    )


def _communication_fraction(scenario: Scenario) -> float:
    """Return the share of the step that is communication of the tensor axis, without what overlaps."""
    if not scenario.is_possible:
        return 1.0
    prediction = scenario.predict()
    return sum(
        prediction.share_of_step(entry)
        for entry in prediction.operations
        if isinstance(entry.operation, Collective) and entry.operation.axis == "tensor"
    )


def _degrees_in_node(scenario: Scenario) -> Iterator[Fix]:
    for degree in reversed(divisors(scenario.device.node_size)):
        fix = tensor_parallel_fix(scenario, degree)
        if fix:
            yield fix


@rule(
    "PL106", "layers-split-unevenly", reads=("config.num_layers", "layout.pipeline_parallel", "layout.virtual_pipeline")
)
def layers_split_unevenly(scenario: Scenario) -> Iterator[Violation]:
    """The layers do not divide over the pipeline stages, so all stages wait for the fullest one.

    ## What it does

    Fires when `num_layers` is not a multiple of `pipeline_parallel` (times `virtual_pipeline`).

    ## Why it is slow

    The fullest stage sets the pace of the pipeline: 33 layers on 4 stages take as long as 36, so a twelfth of the
    device time is lost. (Arithmetic; arXiv 2401.14489 states it as a rule.) This share is the upper limit of the
    reported cost, since fewer stages also reduce the bubble. Less is lost where the first and last stage have fewer
    layers, since they also compute embedding and logits; the prediction includes this.

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("PL106", num_layers=33, pipeline_parallel=4, device="a100-sxm-80gb")
    True

    ## Use instead

    >>> fires("PL106", num_layers=32, pipeline_parallel=4, device="a100-sxm-80gb")
    False

    ## Fix safety

    `runtime` for another number of stages, `retrain` for another depth.

    ## When it does not matter

    Where the missing layers compensate the time of embedding and logits.

    ## References

    - arXiv 2401.14489, section on pipeline parallelism; arXiv 2104.04473, section 2.2.
    """
    layout, num_layers = scenario.layout, scenario.config.num_layers
    chunks = layout.pipeline_parallel * layout.virtual_pipeline
    if num_layers % chunks == 0 or any(layout.ends_as_layers):
        return
    fullest = -(-num_layers // chunks)
    parts = f"{chunks} pipeline stages" if layout.virtual_pipeline == 1 else f"{chunks} model chunks"
    yield Violation(
        field="config.num_layers",
        actual=num_layers,
        wanted=f"a multiple of {chunks}",
        problem=f"is not a multiple of {parts}, so the fullest holds {fullest}",
        fixes=(*_dividing_stages(scenario), *_dividing_depths(scenario, chunks)),
        max_cost_fraction=1.0 - num_layers / (chunks * fullest),
    )


def _dividing_stages(scenario: Scenario) -> Iterator[Fix]:
    """Suggest stage counts that divide the layers, on the same devices with data parallelism adjusted."""
    layout = scenario.layout
    devices = layout.pipeline_parallel * layout.data_parallel
    global_batch_size = effective_global_batch(scenario)
    for stages in divisors(scenario.config.num_layers):
        if stages == layout.pipeline_parallel or devices % stages or stages == 1 < layout.virtual_pipeline:
            continue
        if scenario.config.num_layers % (stages * layout.virtual_pipeline):
            continue
        changes: dict[str, Any] = {"pipeline_parallel": stages}
        title = f"use pipeline_parallel={stages}"
        if devices // stages != layout.data_parallel:
            changes["data_parallel"] = devices // stages
            title += f" with data_parallel={devices // stages}"
        common_changes = {"global_batch_size": global_batch_size} if scenario.workload.is_training else {}
        yield Fix(kind="runtime", title=title, changes=changes, common_changes=common_changes)


def _dividing_depths(scenario: Scenario, chunks: int) -> Iterator[Fix]:
    if not can_change_depth(scenario.config):
        return
    for num_layers in nearest_multiples(scenario.config.num_layers, chunks):
        yield Fix(kind="retrain", title=f"use num_layers={num_layers}", changes={"num_layers": num_layers})
