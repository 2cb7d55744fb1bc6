"""Open the device to measure, and determine what it and the installed PyTorch support."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shapewright.core.errors import BenchError, DeviceError, MissingExtraError
from shapewright.hardware.loader import detect_device
from shapewright.measure.bench.device.backend import Backend, InputPool
from shapewright.measure.bench.device.system_info import Nvml, host_cache_bytes, host_memory_bytes, processor_name

# Last-level cache assumed where neither the driver nor the operating system reports it. [byte]
_CPU_CACHE_BYTES = 64e6
_GPU_CACHE_BYTES = 128e6
# Largest operation that is measured on a CPU: about a second on two cores. [flop]
_CPU_MAX_OPERATION_FLOPS = 2e10
_CPU_DTYPES = ("fp32", "bf16", "fp16")
# First compute capability with tensor cores for the format. Source: NVIDIA CUDA C++ Programming Guide, table
# "Tensor Core element types per compute capability".
_CUDA_DTYPES: Mapping[str, tuple[int, int]] = {
    "fp32": (0, 0), "fp16": (5, 3), "tf32": (8, 0), "bf16": (8, 0), "int8": (7, 5), "fp8": (8, 9),
}  # fmt: skip


def open_backend(*, cpu: bool = False, device_index: int = 0) -> Backend:
    """Open the device to measure.

    Args:
        device_index: Index of the GPU among the visible ones.

    Raises:
        MissingExtraError: PyTorch is not installed.
        BenchError: the GPU does not exist or cannot be used.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            "measuring needs PyTorch, which is not installed; run: pip install 'shapewright[bench]'"
        ) from error
    if cpu:
        return _cpu_backend(torch)
    _require_gpu(torch)
    count = torch.cuda.device_count()
    if not 0 <= device_index < count:
        raise BenchError(f"device_index={device_index} does not exist; this host has GPUs 0 to {count - 1}")
    try:
        found = _gpu_backend(torch, device_index)
        # Fails here, not in every row, if PyTorch has no kernels for this GPU or another process holds it.
        torch.ones(1, device=found.torch_device).add_(1.0).item()
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise BenchError(
            f"PyTorch {torch.__version__} cannot use the GPU: {reason}; install a build for this GPU, free the GPU, or "
            "measure the CPU"
        ) from error
    return found


def _require_gpu(torch: Any) -> None:
    """Check that PyTorch can use a GPU.

    Raises:
        BenchError: PyTorch sees no GPU; the message quotes its warning.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return
    built_for = "ROCm" if getattr(torch.version, "hip", None) else "CUDA" if torch.version.cuda else ""
    if not built_for:
        raise BenchError("PyTorch is built without CUDA or ROCm; measure the CPU, or install a build for the GPU")
    warning = "".join(f" ({str(entry.message).splitlines()[0]})" for entry in caught[-1:])
    raise BenchError(
        f"PyTorch {torch.__version__} is built for {built_for} and sees no GPU{warning}; check the driver "
        "and CUDA_VISIBLE_DEVICES, or measure the CPU"
    )


def _cpu_backend(torch: Any) -> Backend:
    if "OMP_NUM_THREADS" not in os.environ:
        # Threads wait for each other: if one of them loses its core, for example to the process that writes the store,
        # the others wait for whole time slices.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    cache_bytes = host_cache_bytes()
    facts = {
        "processor": processor_name(),
        "num_threads": torch.get_num_threads(),
        "memory_bytes": host_memory_bytes(),
        **({"l2_bytes": cache_bytes} if cache_bytes else {}),
    }
    return Backend(
        is_cuda=False,
        torch_device=torch.device("cpu"),
        pool=InputPool(torch.device("cpu")),
        name="cpu",
        facts=facts,
        driver="",
        # Part of a row's key: rows of other processors or thread counts are different measurements.
        runtime=f"cpu {facts['processor']}, {facts['num_threads']} threads",
        torch_version=str(torch.__version__),
        dtypes=(*_CPU_DTYPES, *_eight_bit_cpu_dtypes(torch)),
        cache_bytes=cache_bytes or _CPU_CACHE_BYTES,
        max_operation_flops=_CPU_MAX_OPERATION_FLOPS,
        # Process time excludes the load of other processes, but with several threads also the wait for each other.
        clock=time.process_time if facts["num_threads"] == 1 else time.perf_counter,
        # Records whether the host was busy.
        read_state=lambda: {"load_average": os.getloadavg()[0]},
    )


def _eight_bit_cpu_dtypes(torch: Any) -> tuple[str, ...]:
    """8-bit formats whose GEMM the installed torch supports on a CPU."""
    zeros, one = torch.zeros(32, 32), torch.ones(())
    found = []
    with suppress(RuntimeError, AttributeError):
        torch._int_mm(zeros.to(torch.int8), zeros.to(torch.int8).t())
        found.append("int8")
    with suppress(RuntimeError, AttributeError):
        narrow = zeros.to(torch.float8_e4m3fn)
        torch._scaled_mm(narrow, narrow.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        found.append("fp8")
    return tuple(found)


def _gpu_backend(torch: Any, index: int) -> Backend:
    torch.cuda.set_device(index)
    properties = torch.cuda.get_device_properties(index)
    hip = getattr(torch.version, "hip", None)
    facts = {
        "name": properties.name,
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "uuid": str(getattr(properties, "uuid", "")),
    }
    try:
        name = detect_device(properties.name, properties.multi_processor_count, properties.total_memory).name
    except DeviceError:
        name = properties.name
    nvml = None
    if not hip:
        with suppress(OSError):
            nvml = Nvml(facts["uuid"])
    version = properties.major, properties.minor
    supported = tuple(dtype for dtype, since in _CUDA_DTYPES.items() if version >= since)
    torch_device = torch.device("cuda", index)
    torch.cuda.set_stream(torch.cuda.Stream(torch_device))
    return Backend(
        is_cuda=True,
        torch_device=torch_device,
        pool=InputPool(torch_device),
        name=name,
        facts=facts,
        driver=nvml.driver() if nvml else "",
        runtime=f"rocm {hip}" if hip else f"cuda {torch.version.cuda}",
        torch_version=str(torch.__version__),
        dtypes=("fp32", "fp16", "bf16") if hip else supported,
        cache_bytes=float(getattr(properties, "L2_cache_size", 0) or _GPU_CACHE_BYTES),
        max_operation_flops=float("inf"),
        read_state=nvml.state if nvml else dict,
    )
