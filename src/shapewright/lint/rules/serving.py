"""Rules on models that inference engines refuse to start, and on the blocks of their KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.core.numeric import round_up
from shapewright.lint.layout_fixes import smaller_degree_fixes
from shapewright.lint.rule import Fix, Violation, rule
from shapewright.memory.estimate import count_cached_elements, estimate_layer_state
from shapewright.models.layers import ATTENTION, mixers_of

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

VOCAB_MULTIPLE = 64
"""Multiple that vLLM and SGLang pad a vocabulary to (DEFAULT_VOCAB_PADDING_SIZE)."""


@rule("SV102", "vocab-split-unevenly", reads=("config.vocab_size", "layout.tensor_parallel", "workload.phase"))
def vocab_split_unevenly(scenario: Scenario) -> Iterator[Violation]:
    """The padded vocabulary does not divide over the tensor parallel devices, so vLLM and SGLang do not start.

    ## What it does

    Fires in prefill and decode when the vocabulary, padded to a multiple of 64 as vLLM and SGLang do, is not a multiple
    of `tensor_parallel`. TensorRT-LLM pads the vocabulary to a multiple of the degree and starts. Heads that a degree
    does not divide are refused by all three engines: `heads-split-unevenly` and `kv-heads-replicated` report them.

    ## Why it is slow

    The engine does not start: "128256 is not divisible by 7". Degrees that are powers of two up to 64 always divide the
    padded vocabulary, so the rule concerns nodes with 3, 5, 6 or 7 usable devices.

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("SV102", phase="decode", tensor_parallel=5, vocab_size=50257)
    True

    ## Use instead

    >>> fires("SV102", phase="decode", tensor_parallel=4, vocab_size=50257)
    False

    ## Fix safety

    `runtime`: a smaller degree. `vocab-not-aligned` suggests padding the vocabulary of the checkpoint.

    ## When it does not matter

    In engines that pad to the degree.

    ## References

    - vLLM 0.10.2, `model_executor/layers/vocab_parallel_embedding.py` (DEFAULT_VOCAB_PADDING_SIZE and `divide`); SGLang
      0.5.3, `srt/layers/vocab_parallel_embedding.py`.
    """
    t, vocab_size = scenario.layout.tensor_parallel, scenario.config.vocab_size
    padded = round_up(vocab_size, VOCAB_MULTIPLE)
    if scenario.workload.is_training or padded % t == 0:
        return
    fixes = smaller_degree_fixes(scenario, t)
    yield Violation(
        field="config.vocab_size",
        actual=vocab_size,
        wanted=f"a multiple of tensor_parallel={t}, padded to a multiple of {VOCAB_MULTIPLE}",
        problem=f"is padded to {padded} by vLLM and SGLang, which tensor_parallel={t} does not divide: neither starts",
        fixes=tuple(fix for fix in fixes if padded % fix.changes["tensor_parallel"] == 0),
        least_severity="warning",
        has_cost=False,
    )


MOST_WASTE_FRACTION = 0.25
"""Most tokens that blocks may keep beyond a window, as a fraction of the window; chosen, not measured."""
_STATE_BLOCK_MULTIPLE = 16
"""Multiple that vLLM rounds the block of a hybrid model up to (model_executor/models/config.py). [token]"""
MOST_PADDING_FRACTION = 0.05
"""Most padding layers, as a fraction of the layers of the model; chosen, not measured."""


@rule(
    "SV103",
    "cache-blocks-unlike-layers",
    reads=(
        "config.attention_windows",
        "config.layer_types",
        "config.num_layers",
        "workload.kv_block_tokens",
        "workload.phase",
    ),
)
def cache_blocks_unlike_layers(scenario: Scenario) -> Iterator[Violation]:
    """Blocks of the KV cache do not suit layers of different kinds, so memory for sequences is wasted.

    ## What it does

    Fires in prefill and decode with a paged cache in models that mix kinds of layers:

    - when a block is smaller than the state of a layer of linear attention or of a state space model: vLLM has one
      block size for all layers and raises it until the keys and values of a block are as large as a state;
    - when blocks are so large that windowed layers keep over a quarter more tokens than their window: a window of W
      tokens touches up to ceil((W - 1) / B) + 1 blocks of B tokens;
    - when the kinds of layers do not divide evenly into groups: vLLM groups layers of one kind by the number of the
      rarest kind and fills the last group of each kind with padding layers.

    ## Why it is slow

    It costs memory, not time: fewer sequences fit. Windows of 128 tokens (gpt-oss) in blocks of 128 keep 256 tokens.
    Gemma 3 27B has 52 windowed and 10 other layers: groups of 10, and 8 padding layers beside 62. (Arithmetic.)

    ## Example

    >>> from shapewright.lint.example import fires
    >>> hybrid = {"attention_windows": (128, 0), "phase": "decode", "context_len": 1000}
    >>> fires("SV103", kv_block_tokens=128, **hybrid)
    True

    ## Use instead

    >>> fires("SV103", kv_block_tokens=16, **hybrid)
    False

    ## Fix safety

    `runtime`: a smaller block. Groups follow from the model; vLLM's `--disable-hybrid-kv-cache-manager` avoids padding,
    but then windowed layers keep all tokens.

    ## When it does not matter

    When the cache is not what limits the batch.

    ## References

    - vLLM 0.10.2, `v1/core/kv_cache_utils.py` (groups of layers, padding) and
      `v1/core/single_type_kv_cache_manager.py`.
    - arXiv 2309.06180, section 4.3: blocks of 16 to 128 tokens serve equally fast.
    """
    config, workload = scenario.config, scenario.workload
    if not workload.is_training and workload.kv_block_tokens > 1 and config.is_hybrid:
        yield from _find_blocks_below_states(scenario)
    windows = Counter(config.window_of_layer(index) for index in range(config.num_layers))
    block = workload.kv_block_tokens
    if workload.is_training or block == 1 or len(windows) < 2:
        return
    shortest = min((window for window in windows if 0 < window < workload.kv_len), default=0)
    if shortest and waste_fraction(shortest, block) > MOST_WASTE_FRACTION:
        fits = [size for size in (128, 64, 32, 16, 8) if waste_fraction(shortest, size) <= MOST_WASTE_FRACTION]
        yield Violation(
            field="workload.kv_block_tokens",
            actual=block,
            wanted=f"at most a quarter of the window of {shortest} tokens",
            problem=(
                f"lets layers with a window of {shortest} tokens keep {kept_tokens(shortest, block)} tokens, "
                f"{100.0 * waste_fraction(shortest, block):.0f} % more"
            ),
            fixes=tuple(
                Fix(kind="runtime", title=f"use {size}", changes={"kv_block_tokens": size}) for size in fits[:1]
            ),
            least_severity="info",
            has_cost=False,
        )
    padding = count_padding_layers(windows)
    if padding > MOST_PADDING_FRACTION * config.num_layers:
        yield Violation(
            field="config.num_layers",
            actual=config.num_layers,
            wanted=f"a multiple of {min(windows.values())} layers of every kind",
            problem=(
                f"has {' and '.join(map(str, sorted(windows.values())))} layers of different windows: vLLM's cache "
                f"groups {min(windows.values())} of one kind, with {padding} padding layers"
            ),
            least_severity="info",
            has_cost=False,
        )


def _find_blocks_below_states(scenario: Scenario) -> Iterator[Violation]:
    """Yield a violation where a block of keys and values is smaller than the largest state of a layer."""
    config, workload, t = scenario.config, scenario.workload, scenario.layout.tensor_parallel
    states = {name: estimate_layer_state(config, workload, name, t) for name in set(config.layer_types)}
    if not any(ATTENTION in mixers_of(name) for name in states):
        return
    element_bytes = get_dtype(workload.kv_cache_dtype or workload.dtype).bits / 8.0
    tokens = ceil(max(states.values()) / (count_cached_elements(config, t) * element_bytes))
    needed = round_up(tokens, _STATE_BLOCK_MULTIPLE)
    block = workload.kv_block_tokens
    if block < needed:
        yield Violation(
            field="workload.kv_block_tokens",
            actual=block,
            wanted=f"at least {needed}",
            problem=(
                f"is smaller than a state, which is as large as the keys and values of {needed} tokens: vLLM raises it "
                f"to that, and sequences waste half a block"
            ),
            fixes=(Fix(kind="runtime", title=f"use {needed}", changes={"kv_block_tokens": needed}),),
            least_severity="info",
            has_cost=False,
        )


def kept_tokens(window: int, block_tokens: int) -> int:
    """Return the tokens of the blocks that a window can touch.

    >>> kept_tokens(128, 128), kept_tokens(4096, 16)
    (256, 4112)
    """
    return round_up(window - 1, block_tokens) + block_tokens


def waste_fraction(window: int, block_tokens: int) -> float:
    """Return the tokens kept beyond a window, as a fraction of the window."""
    return kept_tokens(window, block_tokens) / window - 1.0


def count_padding_layers(counts: Counter[int]) -> int:
    """Return the padding layers that fill the last group of each kind, in groups as large as the rarest kind.

    >>> count_padding_layers(Counter({1024: 52, 0: 10})), count_padding_layers(Counter({128: 12, 0: 12}))
    (8, 0)
    """
    group = min(counts.values())
    return sum(-count % group for count in counts.values())
