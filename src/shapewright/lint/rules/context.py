"""Rules that compare the length of a sequence with the context window and the attention windows of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shapewright.lint.rule import Fix, Violation, rule

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

_BOUNDED = ("learned", "rotary")


@rule(
    "CF101",
    "sequence-over-context-window",
    reads=("workload.seq_len", "workload.context_len", "config.max_position_embeddings", "config.position_embedding"),
)
def sequence_over_context_window(scenario: Scenario) -> Iterator[Violation]:
    """The sequence is longer than the context window of the model.

    ## What it does

    Fires when `seq_len`, plus `context_len` in prefill and decode, exceeds `max_position_embeddings`. It ignores models
    with ALiBi, which extrapolate beyond their training length, and models without position embeddings.

    ## Why it is slow

    The output is wrong: learned position tables end, and rotary positions leave the range seen in training. Attention
    FLOPs also grow with the square of the length: from 2048 to 4096 tokens, 4 b s^2 h of a GPT-3 2.7B layer grow by a
    factor of 4.

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("CF101", seq_len=4096, max_position_embeddings=2048)
    True

    ## Use instead

    >>> fires("CF101", seq_len=2048, max_position_embeddings=2048)
    False

    ## Fix safety

    `runtime` for a shorter sequence. A larger `max_position_embeddings` requires training or scaled rotary positions.

    ## When it does not matter

    Where rotary positions are scaled at run time and the config is unchanged.

    ## References

    - arXiv 2108.12409 (ALiBi), section 2; arXiv 2306.15595 (position interpolation), section 2.
    """
    config, workload = scenario.config, scenario.workload
    length = workload.seq_len if workload.is_training else workload.kv_len
    limit = config.max_position_embeddings
    if length <= limit or config.position_embedding not in _BOUNDED:
        return
    name = "context_len" if workload.phase == "decode" else "seq_len"
    rest = length - getattr(workload, name)
    changes: dict[str, Any] = {name: limit - rest}
    # A shorter sequence takes less time per token, but that is not the reason for the suggestion.
    fixes = (Fix(kind="runtime", title=f"use {name}={limit - rest}", changes=changes),) if limit > rest else ()
    yield Violation(
        field=f"workload.{name}",
        actual=getattr(workload, name),
        wanted=f"at most max_position_embeddings={limit}",
        problem=f"reaches beyond max_position_embeddings={limit}",
        fixes=fixes,
        least_severity="warning",
        has_cost=False,
    )


@rule("CF102", "idle-window", reads=("config.attention_windows", "workload.seq_len", "workload.context_len"))
def idle_window(scenario: Scenario) -> Iterator[Violation]:
    """The attention window is at least as long as the sequence, so it has no effect.

    ## What it does

    Fires when no attention window of the model is shorter than the sequence.

    ## Why it is slow

    It is as slow as without a window: a model chosen for its window runs full attention. Mistral 7B with its window of
    4096 costs the same at 4096 tokens as a model without one; at 32768 tokens the window reduces the average number of
    keys from 16384 to 3840. (Arithmetic.)

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("CF102", attention_windows=(4096,), seq_len=2048)
    True

    ## Use instead

    >>> fires("CF102", attention_windows=(1024,), seq_len=2048)
    False

    ## Fix safety

    No fix is needed; predict with the sequence length that you will run.

    ## When it does not matter

    When you run short sequences only.

    ## References

    - arXiv 2310.06825 (Mistral 7B), section 2.
    """
    windows = [window for window in scenario.config.attention_windows if window]
    length = scenario.workload.kv_len
    if not windows or min(windows) < length:
        return
    yield Violation(
        field="config.attention_windows",
        actual=min(windows),
        wanted=f"below the {length} tokens of a sequence",
        problem=f"is not shorter than the sequence of {length} tokens, so it has no effect",
        least_severity="info",
    )
