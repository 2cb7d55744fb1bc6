"""What is to be served: lengths, limits, devices, element formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.dtypes import get_dtype
from shapewright.errors import WorkloadError
from shapewright.horizon import check_price
from shapewright.integers import is_number, is_whole

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.serving.speculation import Speculation

LONGEST_LEN = 2**27
MOST_DEVICES = 4096
# Limits on times above this are no limits: ten years. [s]
_LONGEST_S = 3e8
DEFAULT_BLOCK_TOKENS = 16
"""Tokens of a cache block, vLLM's default (arXiv 2309.06180, section 4.3, finds 16 to 128 alike)."""
DEFAULT_MEMORY_FRACTION = 0.9
"""Share of a device's memory that a server takes: vLLM's gpu_memory_utilization. What is left covers fragmentation and
communication buffers."""


@dataclass(frozen=True)
class ServingFormat:
    """Element formats of one way to run a model.

    Attributes:
        dtype: That of the products.
        weight_dtype: That of stored weights.
        kv_cache_dtype: That of keys and values in the cache.
    """

    dtype: str
    weight_dtype: str
    kv_cache_dtype: str

    @property
    def name(self) -> str:
        """Products, weights and cache, those left out that follow from the one before.

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
    """Read ``products[:weights[:cache]]``; weights and cache are as the products where they are left out.

    Raises:
        WorkloadError: a format is not known, or there are too many.

    >>> read_format("bf16:int4").weight_dtype, read_format("fp8").kv_cache_dtype
    ('int4', 'fp8')
    """
    words = [get_dtype(word).name for word in text.split(":")]
    if len(words) > 3:
        raise WorkloadError(f"format {text!r} has too many parts; give products:weights:cache, such as bf16:int4:fp8")
    dtype = words[0]
    return ServingFormat(dtype, words[1] if len(words) > 1 else dtype, words[2] if len(words) > 2 else dtype)


def usual_formats(wanted: ServingFormat, device: Device) -> list[ServingFormat]:
    """Formats that are worth a look beside the wanted one: 8-bit products, and 4-bit weights under the wanted ones."""
    found = [ServingFormat("fp8", "fp8", "fp8")] if "fp8" in device.dense_flops_per_s else []
    found.append(ServingFormat(wanted.dtype, "int4", wanted.kv_cache_dtype))
    return [one for one in found if one.name != wanted.name and get_dtype(wanted.weight_dtype).bits > 8]


@dataclass(frozen=True, kw_only=True)
class ServingRequest:
    """What is to be served.

    Attributes:
        prompt_len: Tokens of a prompt.
        output_len: Tokens of an answer.
        cached_len: Tokens of a prompt whose keys and values the cache holds already: earlier turns, a shared prefix.
        ttft_limit_s: Longest time to the first token; None for any. [s]
        tpot_limit_s: Longest time per further token; None for any. [s]
        num_devices: Devices that there are; None for as many as a node has.
        memory_fraction: Share of a device's memory that the server takes.
        block_tokens: Tokens of a cache block.
        speculation: Speculative decoding; None without.
        usd_per_hour: Price of one device; None where it is not known. [USD/h]

    Raises:
        WorkloadError: a value is out of range.
    """

    prompt_len: int
    output_len: int
    cached_len: int = 0
    ttft_limit_s: float | None = None
    tpot_limit_s: float | None = None
    num_devices: int | None = None
    memory_fraction: float = DEFAULT_MEMORY_FRACTION
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    speculation: Speculation | None = None
    usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        check_price(self.usd_per_hour)
        for name, smallest, largest in (
            ("prompt_len", 1, LONGEST_LEN),
            ("output_len", 2, LONGEST_LEN),
            ("block_tokens", 1, LONGEST_LEN),
        ):
            value = getattr(self, name)
            if not is_whole(value, smallest, largest):
                word = {"prompt_len": "isl", "output_len": "osl"}.get(name, name)
                raise WorkloadError(
                    f"{word}={value!r} must be a whole number from {smallest} to {largest}; "
                    + (
                        "an answer of one token is a prefill, see --phase prefill"
                        if value == 1
                        else "give the tokens of one sequence"
                    )
                )
        if not is_whole(self.cached_len, 0, self.prompt_len - 1):
            raise WorkloadError(
                f"cached_prefix={self.cached_len!r} must be a whole number from 0 to {self.prompt_len - 1}, below "
                f"the isl; give the tokens of a prompt that are in the cache already"
            )
        if self.num_devices is not None and not is_whole(self.num_devices, 1, MOST_DEVICES):
            raise WorkloadError(
                f"gpus={self.num_devices!r} must be from 1 to {MOST_DEVICES}; give the devices that there are"
            )
        if not is_number(self.memory_fraction, 0.0, 1.0) or self.memory_fraction == 0.0:
            raise WorkloadError(f"memory_fraction={self.memory_fraction!r} must be above 0 and at most 1; 0.9 is usual")
        for name in ("ttft_limit_s", "tpot_limit_s"):
            value = getattr(self, name)
            if value is not None and not (is_number(value, 0.0, _LONGEST_S) and value > 0.0):
                raise WorkloadError(
                    f"{name[:4]}={value!r} s must be above 0; give a time such as 300ms, in Python as seconds"
                )

    @property
    def new_len(self) -> int:
        """Tokens of a prompt that are prefilled."""
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
    def query_len(self) -> int:
        """New tokens of a sequence in one decode pass."""
        return self.speculation.query_len if self.speculation else 1
