"""Check of a traced module: linear layers and attention heads whose widths cost time, named by their module path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shapewright.core.notebook import NotebookDisplay
from shapewright.core.numeric import round_up
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, with_fields
from shapewright.core.units import format_bytes
from shapewright.lint.evaluate import rate_severity
from shapewright.lint.rule import Finding, Suggestion, get_rule, select_rules
from shapewright.lint.shape_fixes import full_width_multiple, nearest_multiples
from shapewright.lowering.gradients import gemm_gradients
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.prediction.traced import TracedPrediction, predict_trace
from shapewright.pricing.operations import price_operations

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.torch_trace.trace import Trace, TracedLinear

_HEAD_DIM_MULTIPLE = 8
# Widths that save at least this share of what the best one saves are ranked by their distance from the present width.
_ABOUT_EQUAL = 0.98
# Format suggested for fp32 GEMMs.
_MATRIX_DTYPE = "bf16"


@dataclass(frozen=True, kw_only=True, repr=False)
class TracedCheck(NotebookDisplay):
    """Result of the check of a traced module.

    Attributes:
        prediction: The predicted step.
        findings: Findings, the costliest first.
        num_suppressed: Number of findings of ignored rules.
    """

    prediction: TracedPrediction
    findings: tuple[Finding, ...]
    num_suppressed: int = 0


def check_trace(
    trace: Trace, device: Device, *, ignore: Iterable[str] = (), optimizer: str | None = None
) -> TracedCheck:
    """Check the linear layers and attention heads of a traced module, its format and its memory.

    Args:
        ignore: Rules to ignore, by code, name or family; their findings are counted.

    Raises:
        UnknownRuleError: an ignored rule does not exist.
        ShapewrightError: the step cannot be predicted.
    """
    ignored = select_rules(ignore)
    prediction = predict_trace(trace, device, optimizer=optimizer)
    found = [
        *_check_memory(prediction),
        *_check_format(prediction),
        *_check_linears(prediction),
        *_check_heads(prediction),
    ]
    found.sort(key=lambda finding: (finding.cost_s is None, finding.cost_s or 0.0), reverse=True)
    return TracedCheck(
        prediction=prediction,
        findings=tuple(finding for finding in found if finding.code not in ignored),
        num_suppressed=sum(finding.code in ignored for finding in found),
    )


def _check_linears(prediction: TracedPrediction) -> list[Finding]:
    """Find widths of linear layers that are not multiples of a full-width load, or leave tiles mostly empty."""
    trace, device = prediction.trace, prediction.device
    gemms = {(one.m, one.n, one.k, one.layout, one.dtype): one for one in trace.operations if isinstance(one, Gemm)}
    inputs = Counter[int]()
    for linear in trace.linears:
        inputs[linear.in_features] += linear.count
    hidden_size = inputs.most_common(1)[0][0] if inputs else 0
    findings = []
    for linear in trace.linears:
        forward = _forward_gemm(linear, gemms)
        if forward is None:
            continue
        multiple = full_width_multiple(device, forward.dtype)
        # The contraction of a convolution is channels times kernel, and the channels of an image are given.
        for name in ("out_channels",) if linear.is_convolution else ("out_features", "in_features"):
            width = getattr(linear, name)
            is_aligned = width % multiple == 0
            if width < multiple or (is_aligned and width % (4 * multiple) == 0):
                continue
            multiples = (2 * multiple, 4 * multiple) if is_aligned else (multiple,)
            widths = sorted({each for wanted in multiples for each in nearest_multiples(width, wanted)})
            is_vocabulary = linear.is_vocabulary and name == "out_features"
            if is_vocabulary:
                widths = [each for each in widths if each > width]
            times_s = _price_widths(forward, name, (width, *widths), gemms, device)
            code = "WQ103" if is_aligned else "TC101" if is_vocabulary else "TC102" if width == hidden_size else "TC105"
            problem = (
                f"leaves the last tile of its GEMMs mostly empty ({forward.dtype} on {device.name})"
                if is_aligned
                else f"is not a multiple of {multiple} ({forward.dtype} on {device.name})"
            )
            finding = _width_finding(code, linear, name, problem, times_s, prediction)
            if finding is not None:
                findings.append(finding)
    return findings


def _forward_gemm(linear: TracedLinear, gemms: dict[tuple[Any, ...], Gemm]) -> Gemm | None:
    for (m, n, k, _, _), gemm in gemms.items():
        if (m, n, k) == (linear.num_rows, linear.out_features, linear.in_features) and gemm.pass_name == "forward":
            return gemm
    return None


def _price_widths(
    forward: Gemm, name: str, widths: Sequence[int], gemms: dict[tuple[Any, ...], Gemm], device: Device
) -> dict[int, float]:
    """Return the time of one execution of a linear layer with its gradients, by width. [s]"""
    field = "n" if name.startswith("out") else "k"
    has_gradient = [
        isinstance(gradient, Gemm) and (gradient.m, gradient.n, gradient.k, gradient.layout, gradient.dtype) in gemms
        for gradient in gemm_gradients(forward)
    ]
    listed: list[Operation] = []
    for width in widths:
        changed = forward.changed(**{field: width})
        gradients = gemm_gradients(changed)
        listed += [changed, *(one for one, is_run in zip(gradients, has_gradient, strict=True) if is_run)]
    times = [float(price.time_s) for price in price_operations(listed, device)]
    num_gemms = 1 + sum(has_gradient)
    return {width: sum(times[index * num_gemms : (index + 1) * num_gemms]) for index, width in enumerate(widths)}


def _width_finding(
    code: str,
    linear: TracedLinear,
    name: str,
    problem: str,
    times_s: dict[int, float],
    prediction: TracedPrediction,
) -> Finding | None:
    """Return the finding of a width, with better widths as suggestions; None where they save too little time.

    Widths are compared by time per parameter.

    Args:
        times_s: Times of the layer by width, the present one included. [s]
    """
    width = getattr(linear, name)
    step_s = prediction.step_time_s
    gains_s = {
        other: linear.count * (times_s[width] - time_s * width / other)
        for other, time_s in times_s.items()
        if other != width
    }
    best = max(gains_s, key=lambda other: gains_s[other], default=width)
    severity = None if best == width else rate_severity(None, gains_s[best] / step_s)
    if severity is None:
        return None
    cost_s = gains_s[best]
    total = max(prediction.trace.num_parameters, 1)
    other_width = linear.in_features if name.startswith("out") else linear.out_features
    # The nearest of those that save about as much comes first.
    order = sorted(gains_s, key=lambda one: (gains_s[one] < _ABOUT_EQUAL * cost_s, abs(one - width)))
    suggestions = tuple(
        Suggestion(
            kind="exact" if linear.is_vocabulary and name == "out_features" else "retrain",
            title=f"use {name}={other}",
            changes={f"{linear.path}.{name}": other},
            parameters_change_fraction=linear.count * (other - width) * other_width / total,
            predicted_gain_fraction=gains_s[other] / step_s,
        )
        for other in order[:2]
        if gains_s[other] > 0.0
    )
    slowdown = times_s[width] / times_s[best] * best / width
    return _finding(
        code,
        severity,
        path=linear.path,
        name=name,
        actual=width,
        wanted=f"a width such as {best}",
        problem=f"{problem}: predicted {slowdown:.2f}x slower per parameter",
        suggestions=suggestions,
        cost_s=cost_s,
        step_s=step_s,
    )


def _check_heads(prediction: TracedPrediction) -> list[Finding]:
    """Find fused attention whose head dimension is not aligned to 16 bytes, where that costs a visible part."""
    findings = []
    by_width: dict[int, list[Any]] = {}
    for entry in prediction.operations:
        if isinstance(entry.operation, Attention) and entry.operation.head_dim % _HEAD_DIM_MULTIPLE:
            by_width.setdefault(int(entry.operation.head_dim), []).append(entry)
    for head_dim, entries in by_width.items():
        better = round_up(head_dim, _HEAD_DIM_MULTIPLE)
        changed = [one.operation.changed(head_dim=better, v_head_dim=better) for one in entries]
        prices = price_operations(changed, prediction.device)
        saved_s = sum(
            one.total_time_s - float(price.time_s) * int(one.operation.repeats) * head_dim / better
            for one, price in zip(entries, prices, strict=True)
        )
        severity = rate_severity(None, saved_s / prediction.step_time_s)
        if severity is None:
            continue
        findings.append(
            _finding(
                "TC103",
                severity,
                path=entries[0].operation.module.rpartition(".")[0],
                name="head_dim",
                actual=head_dim,
                wanted=f"a multiple of {_HEAD_DIM_MULTIPLE}",
                problem="is not aligned to 16 bytes, as fused attention needs; heads are padded",
                suggestions=(Suggestion(kind="retrain", title=f"use head_dim={better}", changes={"head_dim": better}),),
                cost_s=saved_s,
                step_s=prediction.step_time_s,
            )
        )
    return findings


def _check_format(prediction: TracedPrediction) -> list[Finding]:
    """Find fp32 GEMMs where the device multiplies 16-bit elements faster."""
    trace, device = prediction.trace, prediction.device
    entries = [
        one for one in prediction.operations if isinstance(one.operation, Gemm) and one.operation.dtype == "fp32"
    ]
    if trace.dtype != "fp32" or not entries or _MATRIX_DTYPE not in device.dense_flops_per_s:
        return []
    prices = price_operations([one.operation.changed(dtype=_MATRIX_DTYPE) for one in entries], device)
    saved_s = sum(
        one.total_time_s - float(price.time_s) * int(one.operation.repeats)
        for one, price in zip(entries, prices, strict=True)
    )
    severity = rate_severity(None, saved_s / prediction.step_time_s)
    if severity is None:
        return []
    title = with_fields(
        "use {name} (torch.autocast, or {dtype})", name=_MATRIX_DTYPE, dtype=FieldName("dtype", _MATRIX_DTYPE)
    )
    return [
        _finding(
            "TC108",
            severity,
            path="",
            name="dtype",
            actual="fp32",
            wanted=f"{_MATRIX_DTYPE} or another 16-bit format",
            problem=f"runs GEMMs outside the fast matrix units of {device.name}",
            suggestions=(
                Suggestion(
                    kind="runtime",
                    title=title,
                    changes={"dtype": _MATRIX_DTYPE},
                    predicted_gain_fraction=saved_s / prediction.step_time_s,
                ),
            ),
            cost_s=saved_s,
            step_s=prediction.step_time_s,
        )
    ]


def _check_memory(prediction: TracedPrediction) -> list[Finding]:
    """Find a step that does not fit."""
    if prediction.fits:
        return []
    capacity = format_bytes(prediction.device.memory_bytes)
    return [
        _finding(
            "ME101",
            "error",
            path="",
            name="memory",
            actual=format_bytes(prediction.total_bytes),
            wanted=f"at most {capacity}",
            problem=f"does not fit in the {capacity} of {prediction.device.name}; 'shapewright memory' shows which "
            "module takes what",
        )
    ]


def _finding(
    code: str,
    severity: str,
    *,
    path: str,
    name: str,
    actual: object,
    wanted: str,
    problem: str,
    suggestions: tuple[Suggestion, ...] = (),
    cost_s: float | None = None,
    step_s: float = 0.0,
) -> Finding:
    return Finding(
        code=code,
        name=get_rule(code).name,
        severity=severity,
        field=f"{path}.{name}" if path else name,
        actual=actual,
        wanted=wanted,
        subject=f"{path}: {name}" if path else name,
        problem=problem,
        cost_s=cost_s,
        cost_fraction=None if cost_s is None else cost_s / step_s,
        suggestions=suggestions,
    )
