"""The request of a serving plan: lengths, limits, devices, element formats and speculative decoding.

Speculative decoding: a cheap draft model proposes tokens, and one pass of the model verifies all of them.

Legend: g draft tokens, a probability that each is accepted (independently), c time of one draft step over that of one
decode step of the model, m weights and cache of the draft over those of the model.

    tokens per pass   E = (1 - a^(g+1)) / (1 - a)          g + 1 at most, 1 at least
    speed-up          E T(1) / (T(g + 1) + g c T(1))       T(q): one pass over q new tokens of every sequence
    prompts           1 + m times the time of prefill      the draft reads them too, with about m of the arithmetic
    memory            1 + m times weights and cache        m = c unless given: a step reads weights and cache once, so a
                                                           draft that reads a share m takes at least that share of time

Source: arXiv 2211.17192, equation 1 and theorem 3.8, which assumes T(g + 1) = T(1); here T(g + 1) is predicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import WorkloadError
from shapewright.core.fields import shown
from shapewright.core.ranges import check_integer, check_number
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.prediction.training_run import check_price
from shapewright.pricing.servers import CURRENT_SERVER, Server

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.optimize.serving.adapters import Adapters

_MOST_DRAFT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding.

    Attributes:
        num_draft_tokens: Draft tokens of one pass.
        acceptance_fraction: Probability that a draft token is accepted.
        draft_cost_fraction: Time of one draft step over that of one decode step of the model.
        draft_size_fraction: Weights and cache of the draft over those of the model; None for draft_cost_fraction, which
            is at least as much where memory bounds a step.

    Raises:
        WorkloadError: a value is out of range.
    """

    num_draft_tokens: int
    acceptance_fraction: float
    draft_cost_fraction: float
    draft_size_fraction: float | None = None

    def __post_init__(self) -> None:
        check_integer(
            "num_draft_tokens",
            self.num_draft_tokens,
            1,
            _MOST_DRAFT_TOKENS,
            error=WorkloadError,
            hint="give the draft tokens of one pass, such as 4",
        )
        for name in ("acceptance_fraction", "draft_cost_fraction"):
            check_number(name, getattr(self, name), 0, 1, error=WorkloadError, hint="give a fraction such as 0.7")
        if self.draft_size_fraction is not None:
            hint = "give a fraction such as 0.03"
            check_number("draft_size_fraction", self.draft_size_fraction, 0, 1, error=WorkloadError, hint=hint)

    @property
    def query_len(self) -> int:
        """New tokens of each sequence in one pass: the draft tokens, and the one after the last accepted."""
        return self.num_draft_tokens + 1

    @property
    @shown
    def tokens_per_pass(self) -> float:
        """Expected tokens that one pass adds to a sequence."""
        return expected_tokens_per_pass(self.num_draft_tokens, self.acceptance_fraction)

    @property
    @shown
    def draft_memory_fraction(self) -> float:
        """Memory of the draft's weights and cache over that of the model's."""
        return self.draft_cost_fraction if self.draft_size_fraction is None else self.draft_size_fraction

    def draft_s(self, decode_s: float) -> float:
        """Return the time of the draft tokens of one pass, given that of a decode step of the model. [s]"""
        return self.num_draft_tokens * self.draft_cost_fraction * decode_s


def expected_tokens_per_pass(num_draft_tokens: int, acceptance_fraction: float) -> float:
    """Return the expected tokens of one verifying pass, the token of the model itself included.

    >>> round(expected_tokens_per_pass(4, 0.8), 4), expected_tokens_per_pass(4, 1.0), expected_tokens_per_pass(4, 0.0)
    (3.3616, 5.0, 1.0)

    Source: arXiv 2211.17192, equation 1.
    """
    return float(sum(acceptance_fraction**power for power in range(num_draft_tokens + 1)))


LONGEST_LEN = 2**27
MOST_DEVICES = 4096
# Largest accepted limit of a time: ten years. [s]
_LONGEST_S = 3e8
# Largest accepted load, beyond any service. [1/s]
_MOST_REQUESTS_PER_S = 1e9


@dataclass(frozen=True)
class ServingFormat:
    """Element formats of a served model.

    Attributes:
        dtype: Format of GEMMs.
        weight_dtype: Format of stored weights.
        kv_cache_dtype: Format of keys and values in the cache.
    """

    dtype: str
    weight_dtype: str
    kv_cache_dtype: str

    @property
    @shown
    def name(self) -> str:
        """Formats of GEMMs, weights and cache; those at the end that equal the first are left out.

        >>> ServingFormat("bf16", "bf16", "bf16").name, ServingFormat("bf16", "int4", "fp8").name
        ('bf16', 'bf16:int4:fp8')
        """
        words = [self.dtype]
        if self.weight_dtype != self.dtype or self.kv_cache_dtype != self.dtype:
            words.append(self.weight_dtype)
        if self.kv_cache_dtype != self.dtype:
            words.append(self.kv_cache_dtype)
        return ":".join(words)


def read_format(text: str) -> ServingFormat:
    """Read ``gemms[:weights[:cache]]``; weights and cache default to the format of GEMMs.

    Raises:
        WorkloadError: a format is not known, or there are too many parts.

    >>> read_format("bf16:int4").weight_dtype, read_format("fp8").kv_cache_dtype
    ('int4', 'fp8')
    """
    words = [get_dtype(word).name for word in text.split(":")]
    if len(words) > 3:
        raise WorkloadError(f"format {text!r} has too many parts; give gemms:weights:cache, such as bf16:int4:fp8")
    dtype = words[0]
    return ServingFormat(dtype, words[1] if len(words) > 1 else dtype, words[2] if len(words) > 2 else dtype)


def is_stored_only(dtype: object, device: Device) -> bool:
    """Return whether a format is 4-bit floats (MXFP4) that a device stores but has no GEMMs for."""
    return isinstance(dtype, str) and get_dtype(dtype).name == "fp4" and "fp4" not in device.dense_flops_per_s


def wide_dtype(device: Device) -> str:
    """Return the 16-bit format of a device's GEMMs."""
    return "bf16" if "bf16" in device.dense_flops_per_s else "fp16"


def usual_formats(wanted: ServingFormat, device: Device, narrow: str = "int4") -> list[ServingFormat]:
    """Return formats to compare with the wanted one: 8-bit GEMMs, and 4-bit weights with the wanted GEMMs.

    Args:
        narrow: Format of 4-bit weights.
    """
    found = [ServingFormat("fp8", "fp8", "fp8")] if "fp8" in device.dense_flops_per_s else []
    found.append(ServingFormat(wanted.dtype, narrow, wanted.kv_cache_dtype))
    return [one for one in found if one.name != wanted.name and get_dtype(wanted.weight_dtype).bits > 8]


@dataclass(frozen=True, kw_only=True)
class ServingRequest:
    """What to serve.

    Attributes:
        prompt_len: Tokens of a prompt.
        output_len: Tokens of an answer.
        cached_len: Tokens of a prompt that are already in the cache, such as earlier turns or a shared prefix.
        ttft_limit_s: Longest time to the first token; None for any. [s]
        tpot_limit_s: Longest time per further token; None for any. [s]
        num_devices: Available devices; None for as many as a node has.
        server: The server, which determines kernels and host time of the passes.
        memory_fraction: Share of a device's memory that the server takes.
        block_tokens: Tokens of a cache block.
        speculation: Speculative decoding; None without.
        usd_per_hour: Price of one device; None if unknown. [USD/h]
        requests_per_s: Load to carry; None without one. [1/s]
        adapters: LoRA adapters; None without.

    Raises:
        WorkloadError: a value is out of range.
    """

    prompt_len: int
    output_len: int
    cached_len: int = 0
    ttft_limit_s: float | None = None
    tpot_limit_s: float | None = None
    num_devices: int | None = None
    server: Server = CURRENT_SERVER
    memory_fraction: float = CURRENT_SERVER.memory_fraction
    block_tokens: int = CURRENT_SERVER.block_tokens
    speculation: Speculation | None = None
    usd_per_hour: float | None = None
    requests_per_s: float | None = None
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        check_price(self.usd_per_hour)
        sequence = "give the tokens of one sequence"
        one_token = "an answer of one token is a prefill, see phase='prefill'"
        for name, smallest, hint in (
            ("prompt_len", 1, sequence),
            ("output_len", 2, one_token if self.output_len == 1 else sequence),
            ("block_tokens", 1, "give the tokens of a block of the cache, such as 16"),
        ):
            check_integer(name, getattr(self, name), smallest, LONGEST_LEN, error=WorkloadError, hint=hint)
        check_integer(
            "cached_len",
            self.cached_len,
            0,
            self.prompt_len - 1,
            error=WorkloadError,
            hint=with_fields("give the tokens of a prompt that are in the cache already, fewer than {prompt_len}"),
        )
        if self.num_devices is not None:
            hint = "give the number of available devices"
            check_integer("num_devices", self.num_devices, 1, MOST_DEVICES, error=WorkloadError, hint=hint)
        check_number(
            "memory_fraction", self.memory_fraction, 0, 1, exclude_low=True, error=WorkloadError, hint="0.9 is usual"
        )
        for name in ("ttft_limit_s", "tpot_limit_s"):
            value = getattr(self, name)
            if value is not None:
                hint = "give a time such as 0.3 seconds"
                check_number(name, value, 0, _LONGEST_S, exclude_low=True, error=WorkloadError, hint=hint)
        if self.requests_per_s is not None:
            hint = "give the requests that arrive in a second, such as 12"
            most = _MOST_REQUESTS_PER_S
            check_number(
                "requests_per_s", self.requests_per_s, 0, most, exclude_low=True, error=WorkloadError, hint=hint
            )

    @property
    def new_len(self) -> int:
        """Tokens of a prompt that are not in the cache."""
        return self.prompt_len - self.cached_len

    @property
    def total_len(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_len + self.output_len

    @property
    def tokens_per_pass(self) -> float:
        """Expected tokens that one decode pass adds to a sequence."""
        return self.speculation.tokens_per_pass if self.speculation else 1.0

    @property
    def draft_memory_fraction(self) -> float:
        """Memory of a draft's weights and cache over that of the model's; 0 without one."""
        return self.speculation.draft_memory_fraction if self.speculation else 0.0

    @property
    def query_len(self) -> int:
        """New tokens of a sequence in one decode pass."""
        return self.speculation.query_len if self.speculation else 1
