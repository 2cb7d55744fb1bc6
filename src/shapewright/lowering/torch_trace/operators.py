"""What PyTorch's operators are in our terms: GEMMs, convolutions, and the kinds of memory-bound operations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from shapewright.core.errors import TraceError
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.torch_trace.errors import user_line

UNKNOWN = "unknown"

_DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp32", "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8", "float8_e4m3fnuz": "fp8", "float8_e5m2fnuz": "fp8", "int8": "int8", "uint8": "int8",
    "complex64": "fp32", "complex128": "fp32", "bool": "int8", "int16": "bf16",
}  # fmt: skip

# Operators that run no kernel: they reserve memory or describe tensors. Views are recognized by their storage.
FREE = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_",
    "record_stream", "is_same_size", "sym_size", "sym_stride", "sym_numel", "size", "stride", "wait_tensor",
    "_assert_async", "_assert_tensor_metadata", "set_", "_has_compatible_shallow_copy_type", "_version",
}  # fmt: skip

# Kind of memory-bound operation (POINTWISE_KINDS) by the operator's name without overload; gradients are found by the
# name of their operator without ``_backward``.
_KINDS = {
    "norm": ("_fused_rms_norm", "rms_norm", "linalg_vector_norm", "norm"),
    "layernorm": (
        "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
        "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_no_update", "batch_norm",
        "_batch_norm_with_update_functional",
    ),
    "softmax": ("_softmax", "_log_softmax", "logsumexp", "_safe_softmax", "_softmax_backward_data",
                "_log_softmax_backward_data"),
    "cross_entropy": ("nll_loss_forward", "nll_loss", "nll_loss2d_forward", "nll_loss2d", "cross_entropy_loss"),
    "dropout": ("native_dropout", "bernoulli_", "bernoulli", "rand", "rand_like", "uniform_", "randn", "randn_like",
                "normal_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_",
                "_fused_dropout"),
    "embedding": ("embedding", "embedding_dense", "_embedding_bag", "index_select", "embedding_renorm_",
                  "_embedding_bag_dense", "_embedding_bag_forward_only"),
    "permute": (
        "cat", "stack", "copy_", "_to_copy", "clone", "index", "_unsafe_index", "index_put_", "index_put",
        "_index_put_impl_", "_unsafe_index_put", "index_copy_", "index_copy", "gather", "scatter", "scatter_",
        "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add", "index_add_", "repeat",
        "flip", "roll", "tril", "triu", "tril_", "triu_", "constant_pad_nd", "slice", "select", "slice_scatter",
        "select_scatter", "diagonal_scatter", "diagonal", "unfold", "im2col", "col2im", "pixel_shuffle",
        "pixel_unshuffle", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
        "as_strided_scatter", "masked_select", "nonzero", "repeat_interleave", "slice_copy", "split_copy",
        "split_with_sizes_copy", "take", "channel_shuffle", "contiguous", "index_fill_", "index_fill", "copy",
        "_reshape_copy", "view_as_real_copy", "as_strided", "narrow_copy", "diag_embed", "unbind", "split",
        "masked_scatter", "masked_scatter_",
    ),
    "router": ("topk", "sort", "argsort", "bincount", "histc", "one_hot", "searchsorted", "bucketize", "multinomial",
               "unique", "_unique2", "kthvalue", "mode"),
    "bias": (
        "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "std_mean", "all",
        "any", "prod", "count_nonzero", "nansum", "median", "aminmax", "max_pool2d_with_indices", "avg_pool2d",
        "_adaptive_avg_pool2d", "avg_pool1d", "max_pool2d", "avg_pool3d", "_adaptive_avg_pool3d", "trace", "dot",
        "_adaptive_avg_pool1d", "adaptive_max_pool2d", "equal", "max_pool3d_with_indices", "vdot",
    ),
    "residual": ("add", "add_", "sub", "sub_", "rsub", "zeros", "ones", "full", "zero_", "fill_", "arange", "linspace",
                 "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "scalar_tensor", "eye",
                 "_foreach_add_", "addcmul", "addcdiv", "lerp", "fill", "zero", "randint", "randint_like", "randperm",
                 "logspace", "lift_fresh_copy"),
    "rotary": ("bmm", "baddbmm"),  # outer products alone, see read_gemm
    # Scans along a dimension, transforms and interpolation: one pass over their operands.
    "other": (
        "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "_fft_r2c", "_fft_c2r", "_fft_c2c", "cumsum_",
        "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "grid_sampler_2d", "cdist", "_cdist_forward",
        "upsample_nearest1d", "upsample_linear1d", "upsample_nearest3d", "upsample_trilinear3d", "nan_to_num",
        "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss",
        "binary_cross_entropy", "polar", "complex", "renorm", "frobenius_norm", "_weight_norm_interface", "mse",
        "glu", "prelu", "_prelu_kernel", "rrelu_with_noise", "_cudnn_ctc_loss", "kl_div", "_pdist_forward",
        "floor_divide",
        "log_sigmoid", "_is_all_true", "_is_any_true",
    ),
}  # fmt: skip
KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
# Operators that read some rows of their first tensor only: what they read is what they write.
GATHERS = {"embedding", "index_select", "index", "_unsafe_index", "gather", "take", "masked_select"}
# Operators that read the element of the target in each row of their first tensor.
PICKS = {"nll_loss_forward", "nll_loss2d_forward"}
# Operators that write some elements of their first tensor in place; those that add to them read them too.
_ADDING_SCATTERS = {"index_add_", "scatter_add_", "scatter_reduce_"}
_INDEX_PUTS = {"index_put_", "_index_put_impl_"}
SCATTERS = {*_ADDING_SCATTERS, *_INDEX_PUTS, "index_copy_", "scatter_", "index_fill_", "masked_scatter_"}
# Operators that write all of their first tensor in place without reading it.
OVERWRITES = {
    "copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "exponential_", "geometric_", "log_normal_",
    "cauchy_", "random_",
}  # fmt: skip
# Operators that take only sizes and format of a tensor, by its position.
LIKENESSES = {
    **dict.fromkeys(
        ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones",
         "new_full"), 0
    ),
    **dict.fromkeys(
        ("nll_loss_backward", "nll_loss2d_backward", "max_pool2d_with_indices_backward", "avg_pool2d_backward",
         "max_pool3d_with_indices_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward",
         "_adaptive_avg_pool3d_backward"), 1
    ),
}  # fmt: skip
# Norms, softmax and reductions can be merged with the pointwise operations around them, as torch.compile does.
FUSIBLE_KINDS = {"norm", "layernorm", "softmax", "residual", "activation", "dropout", "bias", "cross_entropy", "rotary"}
FUSIBLE_NAMES = {
    "_to_copy", "clone", "cat", "tril", "triu", "constant_pad_nd", "slice_backward", "select_backward", "copy_", "flip",
    "embedding", "gather", "index",
}  # fmt: skip

_GEMMS = {"mm": 0, "addmm": 1, "_addmm_activation": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0, "_int_mm": 0}
_VECTORS = {"mv": 0, "addmv": 1}


def kind_of(name: str, *, is_pointwise: bool) -> str:
    """Kind of a memory-bound operator; UNKNOWN where it is neither elementwise nor in the table.

    >>> kind_of("native_layer_norm_backward", is_pointwise=False), kind_of("scan", is_pointwise=False)
    ('layernorm', 'unknown')
    """
    base = name.removesuffix("_forward").removesuffix("_backward_data").removesuffix("_backward")
    found = KIND_OF.get(name) or KIND_OF.get(base) or KIND_OF.get(name.rstrip("_"))
    return found or ("activation" if is_pointwise else UNKNOWN)


def adds_to_target(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator of SCATTERS adds to the elements that it writes."""
    return name in _ADDING_SCATTERS or (name in _INDEX_PUTS and len(args) > 3 and bool(args[3]))


def count_scattered(name: str, args: Sequence[Any]) -> int:
    """Elements that an operator of SCATTERS writes."""
    target = args[0]
    if name in _INDEX_PUTS:
        import torch

        shapes = [one.shape for one in args[1] if one is not None]
        rest = prod(size for dim, size in enumerate(target.shape) if dim >= len(args[1]) or args[1][dim] is None)
        return int(prod(torch.broadcast_shapes(*shapes)) * rest)
    if name.startswith("index_"):
        return int(args[2].numel() * target.numel() // target.shape[args[1]])
    return int(args[2].numel())  # indices of each element, or what is scattered by a mask


def filled_mask(name: str, args: Sequence[Any]) -> Any:
    """Mask of an assignment of one number by a mask, which PyTorch runs as masked_fill_; None for others.

    Source: canDispatchToMaskedFill in aten/src/ATen/native/TensorAdvancedIndexing.cpp.
    """
    is_one = name in _INDEX_PUTS and len(args[1]) == 1 and args[1][0] is not None and args[2].numel() == 1
    if not is_one or adds_to_target(name, args) or "bool" not in str(args[1][0].dtype):
        return None
    return args[1][0].reshape(*args[1][0].shape, *(1,) * (args[0].dim() - args[1][0].dim()))


def dtype_of(tensor: Any) -> str:
    """Our name of the element format of a tensor, or of a torch dtype; integers count by their width."""
    name = str(getattr(tensor, "dtype", tensor)).removeprefix("torch.")
    return _DTYPES.get(name, "fp32")


def letter_of(matrix: Any) -> str:
    """N where rows lie in memory one after another, T where columns do."""
    rows, columns = matrix.stride()[-2:]
    return "T" if rows == 1 and columns != 1 and matrix.shape[-1] > 1 else "N"


def read_gemm(name: str, args: Sequence[Any], dtype_of: Any) -> Operation | None:
    """Read a GEMM from the arguments of an operator; None for other operators, and for outer products.

    Args:
        name: Name of the operator without namespace and overload.
        dtype_of: Function that names the element format of a tensor.
    """
    if name in _GEMMS:
        first, second = args[_GEMMS[name]], args[_GEMMS[name] + 1]
        _refuse_mixed(first, second)
        m, k = first.shape[-2:]
        n = second.shape[-1]
        batch = first.shape[0] if first.dim() == 3 else 1
        # Batched outer products, as of positions and frequencies, are pointwise work.
        if (k == 1 and first.dim() == 3) or 0 in (m, n, k, batch):
            return None
        layout = letter_of(first) + letter_of(second)
        return Gemm(name="", m=m, n=n, k=k, batch=batch, layout=layout, dtype=dtype_of(first))
    if name in _VECTORS:
        first = args[_VECTORS[name]]
        m, k = first.shape
        return Gemm(name="", m=m, n=1, k=k, layout=letter_of(first) + "N", dtype=dtype_of(first)) if k > 1 else None
    if name == "_grouped_mm":
        first, second = args[0], args[1]
        if first.dim() != 2:
            return None
        (m, k), n = first.shape, second.shape[-1]
        groups = second.shape[0] if second.dim() == 3 else args[2].shape[0]
        layout = letter_of(first) + letter_of(second)
        return GroupedGemm(
            name="", m=m, n=n, k=k, groups=groups, layout=layout, dtype=dtype_of(first), is_training=True
        )
    return None


def _refuse_mixed(first: Any, second: Any) -> None:
    """Refuse a GEMM of whole and of floating numbers, which fails everywhere but on the meta device."""
    if first.is_floating_point() != second.is_floating_point():
        formats = " and ".join(str(one.dtype).removeprefix("torch.") for one in (first, second))
        raise TraceError(
            f"{user_line()}: a GEMM of {formats}",
            advice="give the inputs the element format that the module takes, such as x=float32[4,2048]",
        )


def read_convolution(name: str, args: Sequence[Any], output: Any, dtype_of: Any) -> list[tuple[str, Operation]]:
    """Read a convolution as implicit GEMMs: (gradient, GEMM) each; empty for other operators and depthwise ones."""
    if name in ("convolution", "_convolution", "cudnn_convolution"):
        source, weight, outputs = args[0], args[1], [("", output)]
        transposed, groups = (args[6], args[8]) if name != "cudnn_convolution" else (False, args[5])
    elif name == "convolution_backward":
        source, weight, transposed, groups, wanted = args[1], args[2], args[7], args[9], args[10]
        outputs = [
            (gradient, args[0]) for gradient, is_wanted in zip(("dgrad", "wgrad"), wanted, strict=False) if is_wanted
        ]
    else:
        return []
    if not outputs:
        return []
    sizes = convolution_gemms(source.shape, weight.shape, outputs[0][1].shape, transposed=transposed, groups=groups)
    found: list[tuple[str, Operation]] = []
    for gradient in (gradient for gradient, _ in outputs if sizes):
        m, n, k, layout = sizes[gradient]
        found.append((gradient, Gemm(name="", m=m, n=n, k=k, batch=groups, layout=layout, dtype=dtype_of(source))))
    return found


def convolution_gemms(
    source: Sequence[int], weight: Sequence[int], output: Sequence[int], *, transposed: bool, groups: int
) -> dict[str, tuple[int, int, int, str]]:
    """Sizes m, n and k and layout of the implicit GEMM of each group of a convolution, and of its two gradients.

    Rows are the positions of the output, columns its channels, and the contraction runs over input channels and kernel.
    A depthwise convolution has one channel per group: it is memory traffic, and has no GEMM here.

    Args:
        source: Dimensions of the input: samples, channels, positions.
        weight: Dimensions of the weight: output channels, input channels of a group, kernel.
        output: Dimensions of the output, as those of the input.

    Source: arXiv 1410.0759 (cuDNN), section 3.

    >>> convolution_gemms((2, 3, 64, 64), (64, 3, 16, 16), (2, 64, 4, 4), transposed=False, groups=1)[""]
    (32, 64, 768, 'NT')
    """
    # A transposed convolution is the gradient of a convolution: its input has the role of the output.
    positions_of = source if transposed else output
    positions = positions_of[0] * prod(positions_of[2:])
    channels, kernel = weight[0] // groups, prod(weight[1:])
    if channels == 1 and weight[1] == 1:
        return {}
    sizes = {
        "": (positions, channels, kernel, "NT"),
        "dgrad": (positions, kernel, channels, "NN"),
        "wgrad": (channels, kernel, positions, "TN"),
    }
    if transposed:
        sizes[""], sizes["dgrad"] = sizes["dgrad"], sizes[""]
    return sizes


_COLLECTIVES = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "alltoall", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce", "all_reduce_": "all_reduce", "all_gather_into_tensor_out": "all_gather",
    "broadcast": "send_recv",
}  # fmt: skip


def read_collective(name: str, num_ranks: int, num_bytes: float) -> Operation | None:
    """Read a functional collective; None where it is not one of those that can be priced.

    A module that sends its own tensors divides its work: tensor parallelism, or experts where each rank sends to each.
    FSDP's collectives, which divide the data, are recorded where its hooks are replaced.

    Args:
        name: Name of the operator without namespace and overload.
        num_bytes: Larger of its input and output. [byte]
    """
    if name not in _COLLECTIVES:
        return None
    return Collective(
        name="",
        op_name=_COLLECTIVES[name],
        axis="expert" if _COLLECTIVES[name] == "alltoall" else "tensor",
        message_bytes=num_bytes,
        num_ranks=num_ranks,
        ranks_per_node=num_ranks,
    )
