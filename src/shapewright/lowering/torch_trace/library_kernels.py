"""Kernels of other libraries in a trace: scans, short convolutions and flash attention, which run on GPUs alone.

While a trace runs, functions of these libraries are replaced in the files of the traced modules, as are the functions
of transformers that stand for them where they are not installed. In the process that traces a user's file, a library
that is not installed can be imported: it has the functions below and no others.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.lowering.torch_trace.fused_kernels import FusedCall, scaled_dot_product_attention
from shapewright.lowering.torch_trace.operators import dtype_of

_DIMS_OF_THREE = 5
PACKAGES = ("causal_conv1d", "fla", "flash_attn", "flash_attn_interface", "mamba_ssm")
"""Libraries whose functions are replaced."""


def _flash_attention(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False,  # noqa: FBT001, FBT002  (the signature is the library's)
    window_size: Sequence[int] = (-1, -1), **options: Any,
) -> Any:  # fmt: skip
    """Attention over tensors of shape [batch, tokens, heads, head dim]; a window has keys to the left and to the right.

    Source: flash_attn/flash_attn_interface.py of flash-attn 2.8.
    """
    del dropout_p, softmax_scale
    left, right = window_size[0], 0 if causal else window_size[1]
    window = left + 1 + right if left >= 0 and right >= 0 else 0
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    output = scaled_dot_product_attention(q, k, v, is_causal=right == 0, window_size=window).transpose(1, 2)
    return (output, None, None) if options.get("return_attn_probs") else output


def _packed_flash_attention(qkv: Any, *args: Any, **options: Any) -> Any:
    """The same with queries, keys and values in one tensor [batch, tokens, 3, heads, head dim]."""
    return _flash_attention(*qkv.unbind(2), *args, **options)


def _flash_attention_3(
    q: Any, k: Any, v: Any, softmax_scale: float | None = None,
    causal: bool = False,  # noqa: FBT001, FBT002  (the signature is the library's)
    *descaled: Any, **options: Any,
) -> Any:  # fmt: skip
    """The same of FlashAttention 3, which has no dropout, and returns the sums of exponentials beside the output.

    Source: hopper/flash_attn_interface.py of flash-attention: qv and three scales stand before the window.
    """
    del softmax_scale
    sides = descaled[4] if len(descaled) > 4 else options.get("window_size", (-1, -1))
    output = _flash_attention(q, k, v, causal=causal, window_size=sides)
    return (output, None) if options.get("return_attn_probs") else output


def _packed_flash_attention_3(qkv: Any, softmax_scale: float | None = None, *args: Any, **options: Any) -> Any:
    """The same with queries, keys and values in one tensor, of [..., 3, heads, head dim] or of all heads."""
    queries = options.pop("num_heads_q", None)
    if qkv.dim() == _DIMS_OF_THREE:
        parts = qkv.unbind(2)
    else:
        keys = (qkv.shape[2] - queries) // 2
        parts = qkv.split([queries, keys, keys], dim=2)
    if len(args) > 1:  # the scales stand after the mask, without qv
        args = (args[0], None, *args[1:])
    return _flash_attention_3(*parts, softmax_scale, *args, **options)


def _convolution(x: Any, weight: Any, bias: Any = None, *args: Any, **options: Any) -> Any:
    """Convolution of x[batch, channels, tokens] with weight[channels, width].

    Source: causal_conv1d/causal_conv1d_interface.py of causal-conv1d 1.5.
    """
    import torch

    del args
    batch_size, channels, seq_len = x.shape
    # The layer's scan, which runs later, says which rule it is of.
    work = CausalConv(
        name="", rule="short_convolution", batch_size=batch_size, seq_len=seq_len, channels=channels,
        width=weight.shape[-1], dtype=dtype_of(x),
    )  # fmt: skip
    output = _run("causal_conv1d", work, torch.empty_like(x), x, weight, bias)
    wants_state = options.get("return_final_states")
    return (output, x.new_empty(batch_size, channels, weight.shape[-1] - 1)) if wants_state else output


def _scan_of_heads(rule: str) -> Callable[..., Any]:
    """Delta rule or linear attention over q, k[batch, tokens, heads, key width] and v[..., value width].

    Source: fla/ops of flash-linear-attention 0.4.
    """

    def scan(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        import torch

        gates = [one for one in (*args, *options.values()) if isinstance(one, torch.Tensor)]
        work = _scan(rule, k.shape[0], v.shape[1], k.shape[-2:], v.shape[-2:], v)
        output = _run(rule, work, v.new_empty(v.shape, dtype=q.dtype), q, k, v, *gates)
        state = v.new_empty(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=torch.float32)
        return output, state if options.get("output_final_state") else None

    return scan


def _scan_of_chunks(x: Any, dt: Any, A: Any, B: Any, C: Any, *args: Any, **options: Any) -> Any:  # noqa: N803
    """Mamba-2: x[batch, tokens, heads, width], dt[batch, tokens, heads], B and C[batch, tokens, groups, state].

    Source: mamba_ssm/ops/triton/ssd_combined.py of mamba-ssm 2.2.
    """
    import torch

    del args
    work = _scan("mamba2", x.shape[0], x.shape[1], B.shape[-2:], x.shape[-2:], x)
    others = [options.get(name) for name in ("D", "z", "dt_bias", "initial_states")]
    output = _run("mamba2", work, torch.empty_like(x), x, dt, A, B, C, *others)
    state = x.new_empty(x.shape[0], *x.shape[2:], B.shape[-1], dtype=torch.float32)
    return (output, state) if options.get("return_final_states") else output


def _selective_scan(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None,  # noqa: N803
    *args: Any, **options: Any,
) -> Any:  # fmt: skip
    """Mamba-1: u and delta[batch, channels, tokens], A[channels, state], B and C[batch, state, tokens].

    Source: mamba_ssm/ops/selective_scan_interface.py of mamba-ssm 2.2.
    """
    import torch

    batch_size, channels, seq_len = u.shape
    work = _scan("mamba", batch_size, seq_len, (1, A.shape[-1]), (channels, 1), u)
    output = _run("mamba", work, torch.empty_like(u), u, delta, A, B, C, D, z, delta_bias)
    wants_state = options.get("return_last_state") or (len(args) > 1 and args[1])
    return (output, u.new_empty(batch_size, *A.shape, dtype=torch.float32)) if wants_state else output


def _scan(
    rule: str, batch_size: int, seq_len: int, keys: Sequence[int], values: Sequence[int], dtype_source: Any
) -> Scan:
    """Scan with heads and widths of keys and of values."""
    return Scan(
        name="", rule=rule, batch_size=batch_size, seq_len=seq_len, num_k_heads=keys[0], k_head_dim=keys[1],
        num_v_heads=values[0], v_head_dim=values[1], dtype=dtype_of(dtype_source),
    )  # fmt: skip


def _run(operator: str, work: Scan | CausalConv, output: Any, *tensors: Any) -> Any:
    """Run a scan or a convolution, whose gradient computes its states again from its inputs."""
    backward = work.changed(is_backward=True)
    return FusedCall(operator=operator, work=work, backward_work=backward, output=output).run(*tensors)


_GATED_DELTA, _KIMI_DELTA = _scan_of_heads("gated_delta_net"), _scan_of_heads("kimi_delta_attention")
_LIGHTNING = _scan_of_heads("lightning_attention")
REPLACED: dict[str, Callable[..., Any]] = {
    "flash_attn_func": _flash_attention,
    "flash_attn_qkvpacked_func": _packed_flash_attention,
    "causal_conv1d_fn": _convolution,
    "chunk_gated_delta_rule": _GATED_DELTA,
    "fused_recurrent_gated_delta_rule": _GATED_DELTA,
    "chunk_kda": _KIMI_DELTA,
    "fused_recurrent_kda": _KIMI_DELTA,
    "chunk_lightning_attn": _LIGHTNING,
    "chunk_simple_gla": _LIGHTNING,
    "mamba_chunk_scan_combined": _scan_of_chunks,
    "selective_scan_fn": _selective_scan,
}
"""Functions by their name in the libraries."""
_OF_PACKAGE: dict[str, dict[str, Callable[..., Any]]] = {
    "flash_attn_interface": {
        "flash_attn_func": _flash_attention_3,
        "flash_attn_qkvpacked_func": _packed_flash_attention_3,
    }
}


def replacements_of(package: str) -> dict[str, Callable[..., Any]]:
    """Functions by their name in a library; those of FlashAttention 3 have the names of FlashAttention 2."""
    return REPLACED | _OF_PACKAGE.get(package, {})


# Names of the same functions in transformers.
_NAMES_OF_TRANSFORMERS = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "chunk_kimi_delta_attention": "chunk_kda",
    "mamba2_chunk_scan": "mamba_chunk_scan_combined",
    "mamba_selective_scan": "selective_scan_fn",
}


@contextmanager
def replaced_libraries(module: Any) -> Iterator[None]:
    """Replace the functions of libraries in the files of a module and its submodules."""
    files = {type(one).__module__ for one in module.modules()}
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for file in files & sys.modules.keys():
            names = vars(sys.modules[file])
            for name, function in [*names.items()]:
                home = str(getattr(function, "__module__", "")).partition(".")[0]
                replacement = replacements_of(home).get(_NAMES_OF_TRANSFORMERS.get(name, name))
                if replacement is not None and callable(function) and home in (*PACKAGES, "transformers"):
                    changed.append((names, name, function))
                    names[name] = replacement
        yield
    finally:
        for names, name, function in changed:
            names[name] = function


class _Finder:
    """Finds libraries that are not installed."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Specification of a module of these libraries."""
        del path, target
        is_own = name.partition(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_own else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        """A module with the functions that are known."""
        module = ModuleType(spec.name)
        vars(module).update(replacements_of(spec.name.partition(".")[0]))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


def import_missing_libraries() -> None:
    """Let a user's file import libraries that are not installed, for the rest of the process."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))
