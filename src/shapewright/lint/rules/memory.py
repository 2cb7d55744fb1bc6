"""Rules on the memory of a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shapewright.core.numeric import divisors
from shapewright.core.units import format_bytes, format_percent
from shapewright.lint.rule import Fix, Violation, rule
from shapewright.memory.activations import estimate_logit_gradient, estimate_logits
from shapewright.memory.stages import Stage
from shapewright.workload.layout import MAX_ZERO_STAGE_IN_PIPELINES

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


@rule(
    "ME101",
    "memory-exceeded",
    reads=("device.memory_bytes", "workload.micro_batch_size", "workload.recompute", "layout.zero_stage"),
)
def memory_exceeded(scenario: Scenario) -> Iterator[Violation]:
    """The step needs more memory than the device has.

    ## What it does

    Fires when the estimated memory of weights, gradients, optimizer states, activations, logits and KV cache exceeds
    the device memory.

    ## Why it is slow

    The step fails with "CUDA out of memory". Mixed-precision training with AdamW needs 18 bytes per parameter without
    activations (stas00/ml-engineering, "Anatomy of Model's Memory Usage"): 2.65 billion parameters take 47.7 GB, more
    than an A100 with 40 GB has.

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("ME101", num_layers=48)
    True

    ## Use instead

    >>> fires("ME101", num_layers=2)
    False

    ## Fix safety

    `runtime`. Recomputation costs time, sharding costs communication; options that fit are listed with the fastest
    first. Where nothing fits on the same devices, the layout with the fewest devices is suggested, for a mixture of
    experts also the one with the fewest devices that keeps experts whole.

    ## When it does not matter

    Never: the step cannot run. The estimate does not include fragmentation and communication buffers, so a step
    slightly below the limit may fail too. Offload counts only where the workload sets `offload_activations` or
    `offload_optimizer`.

    ## References

    - arXiv 2205.05198 (activations), arXiv 1910.02054 (ZeRO), `shapewright memory`.
    """
    if not scenario.is_possible or scenario.fits:
        return
    needed_bytes = scenario.predict().memory.total_bytes
    yield Violation(
        field="device.memory_bytes",
        actual=format_bytes(scenario.device.memory_bytes),
        wanted=f"at least {format_bytes(needed_bytes)}",
        problem=f"of {scenario.device.name} is less than the {format_bytes(needed_bytes)} that the step needs",
        fixes=tuple(_fitting_fixes(scenario, _same_devices(scenario)))
        or tuple(
            fix
            for stage_layouts in (_tensor_layouts(scenario), _expert_layouts(scenario))
            for fix in itertools.islice(_fitting_fixes(scenario, _more_devices(scenario, stage_layouts)), 1)
        ),
        least_severity="error",
        has_cost=False,
    )


def _fitting_fixes(scenario: Scenario, candidates: Iterable[dict[str, Any]]) -> Iterator[Fix]:
    """Yield the changes that fit as fixes, one by one, since each one needs a memory estimate."""
    for changes in candidates:
        after = scenario.try_replace(changes)
        if after is not None and after.fits:
            title = "use " + ", ".join(f"{name}={value}" for name, value in changes.items())
            yield Fix(kind="runtime", title=title, changes=changes)


def _same_devices(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Yield single changes, and the combination of full recomputation with a micro-batch of 1."""
    workload, layout = scenario.workload, scenario.layout
    if workload.attention == "unfused":
        yield {"attention": "flash"}
    recompute = [mode for mode in ("selective", "full") if workload.is_training and mode != workload.recompute]
    yield from ({"recompute": mode} for mode in recompute)
    if workload.recompute_layers is not None:
        yield {"recompute_layers": scenario.config.num_layers}
    smaller = [size for size in reversed(divisors(workload.micro_batch_size)) if size < workload.micro_batch_size]
    yield from ({"micro_batch_size": size} for size in smaller)
    if workload.is_training and layout.data_parallel > 1:
        most = MAX_ZERO_STAGE_IN_PIPELINES if layout.pipeline_parallel > 1 else 3
        yield from ({"zero_stage": stage} for stage in range(layout.zero_stage + 1, most + 1))
    for degree in divisors(scenario.device.node_size):
        factor, rest = divmod(degree, layout.tensor_parallel)
        if factor > 1 and not rest and layout.data_parallel % factor == 0:
            yield {"tensor_parallel": degree, "data_parallel": layout.data_parallel // factor}
    if layout.data_parallel > 1:
        yield from (
            {"expert_parallel": degree} for degree in _expert_degrees(scenario) if degree > layout.expert_parallel
        )
    if smaller and recompute:
        yield {"micro_batch_size": 1, "recompute": "full"}


def _more_devices(scenario: Scenario, stage_layouts: Mapping[int, dict[str, int]]) -> Iterator[dict[str, Any]]:
    """Yield layouts on more devices, the fewest first, with more devices per stage and more pipeline stages.

    Args:
        stage_layouts: Layout changes by number of devices per stage.
    """
    layout = scenario.layout
    stages = [count for count in divisors(scenario.config.num_layers) if count % layout.pipeline_parallel == 0]
    layouts = sorted(itertools.product(stages, stage_layouts), key=lambda pair: (pair[0] * pair[1], pair[0]))
    for stage_count, devices in layouts:
        changes = {**stage_layouts[devices], "pipeline_parallel": stage_count}
        changed = {name: value for name, value in changes.items() if value != getattr(layout, name)}
        if changed:
            yield changed
            if scenario.workload.is_training and scenario.workload.recompute != "full":
                yield {**changed, "recompute": "full"}


def _tensor_layouts(scenario: Scenario) -> dict[int, dict[str, int]]:
    """Return tensor parallel layouts inside a node, by number of devices per stage."""
    degrees = [
        degree for degree in divisors(scenario.device.node_size) if degree % scenario.layout.tensor_parallel == 0
    ]
    return {degree: {"tensor_parallel": degree} for degree in degrees}


def _expert_layouts(scenario: Scenario) -> dict[int, dict[str, int]]:
    """Return layouts with whole experts on each device, by number of devices per stage; none with data parallelism.

    In training, the optimizer states of replicated weights are sharded, as by Megatron-LM's distributed optimizer.
    """
    if scenario.layout.data_parallel > 1:
        return {}
    sharded = {"zero_stage": max(scenario.layout.zero_stage, 1)} if scenario.workload.is_training else {}
    return {
        degree * scenario.layout.tensor_parallel: {"data_parallel": degree, "expert_parallel": degree, **sharded}
        for degree in _expert_degrees(scenario)[1:]
    }


def _expert_degrees(scenario: Scenario) -> tuple[int, ...]:
    """Return the possible expert parallel degrees with whole experts; none for a dense model."""
    return divisors(scenario.config.num_experts) if scenario.config.is_moe else ()


# Share of device memory from which a chunked loss allows a considerably larger micro-batch.
LARGE_LOGITS_FRACTION = 0.1


@rule(
    "ME102",
    "large-logits",
    reads=(
        "config.vocab_size",
        "workload.micro_batch_size",
        "workload.seq_len",
        "workload.loss_chunks",
        "workload.kernels",
        "layout.tensor_parallel",
    ),
)
def large_logits(scenario: Scenario) -> Iterator[Violation]:
    """The fp32 logits of one micro-batch take a large part of the device memory.

    ## What it does

    Training only. Fires when the logits and their gradient take a tenth of the device memory or more.

    ## Why it is slow

    It limits the micro-batch. Cross entropy stores its softmax in fp32, 4 bytes per token and vocabulary entry, plus
    the gradient, when all activations are still in memory. Llama 3 8B with 8192 tokens and a vocabulary of 128256
    stores 3.9 GiB of softmax and 2 GiB of gradient; torchtitan measured 7 GiB (pull request 996).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("ME102", vocab_size=256000, micro_batch_size=8, num_layers=2)
    True

    ## Use instead

    Compute the loss in chunks of tokens or in a fused kernel (`liger-kernel`, `torch.compile`), split the vocabulary
    over the tensor axis, or reduce the micro-batch.

    >>> fires("ME102", vocab_size=32000, micro_batch_size=2, num_layers=2)
    False

    ## Fix safety

    A chunked loss computes the same function. Not every framework has one, so no change is suggested. With
    `loss_chunks` set, this rule counts one chunk, with `kernels="fused"` one of the fused kernel's.

    >>> fires("ME102", vocab_size=256000, micro_batch_size=8, num_layers=2, loss_chunks=16)
    False

    ## When it does not matter

    Where memory is not the limit.

    ## References

    - pytorch/torchtitan pull requests 996 and 4514; arXiv 2205.05198, section 4.3.
    """
    if not scenario.workload.is_training or not scenario.is_possible:
        return
    workload, layout = scenario.workload, scenario.layout
    stage = Stage(scenario.config, layout, layout.pipeline_parallel - 1)
    logits_bytes = estimate_logits(stage, workload) + estimate_logit_gradient(stage, workload)
    fraction = logits_bytes / scenario.device.memory_bytes
    if fraction < LARGE_LOGITS_FRACTION:
        return
    yield Violation(
        field="config.vocab_size",
        actual=scenario.config.vocab_size,
        wanted="a chunked or fused loss",
        problem=(
            f"makes logits and gradient of {format_bytes(logits_bytes)}, {format_percent(fraction)} of "
            f"{scenario.device.name}; compute the loss in chunks (loss_chunks)"
        ),
        least_severity="info" if scenario.fits else "warning",
    )
