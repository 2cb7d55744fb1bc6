"""design: shape, plan and run for a size and tokens, or for a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from shapewright.app.api.parts import ScenarioLike, ScenarioParts, given_fields, takes_scenario
from shapewright.core.errors import ConfigError, ShapewrightError, WorkloadError
from shapewright.core.ranges import check_integer, whole_number
from shapewright.core.texts import with_fields
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.prediction.build import build_scenario, find_device
from shapewright.prediction.scenario import Scenario

if TYPE_CHECKING:
    from shapewright.core.notes import Note
    from shapewright.models.read import Model, ModelLike
    from shapewright.optimize.design.result import DesignResult
    from shapewright.optimize.plan.result import Plan

_DEFAULT_FAMILY = "llama"
_DEFAULT_SEQ_LEN = 4096
# A size of the family that every device and vocabulary allows, to read sequence length and format with.
_ANY_SIZE = 10**9
# Largest tensor degree that divides the heads of a scaled shape.
_MOST_TENSOR_PARALLEL = 2


@takes_scenario
def design(
    config: ScenarioLike = None,
    *,
    num_devices: int,
    num_parameters: int | None = None,
    train_tokens: int | None = None,
    hours: float | None = None,
    gpu_hours: float | None = None,
    usd: float | None = None,
    usd_per_hour: float | None = None,
    family: str | None = None,
    global_batch_tokens: int | None = None,
    tokenizer_vocab: int | None = None,
    keep: Mapping[str, Any] | None = None,
    formats: Sequence[str] = (),
    tolerance_fraction: float = 0.02,
    guard: str = "usual",
    headroom_fraction: float = 0.0,
    straggler_factor: float = 1.0,
    top: int = 6,
    progress: Callable[[int, int], None] | None = None,
    **parts: Unpack[ScenarioParts],
) -> DesignResult:
    """Design a model and its training run: shape, layout, micro-batch, recomputation and schedule together.

    Size and tokens are given, or chosen for a budget: without ``num_parameters`` the size of the lowest loss, without
    ``train_tokens`` as many as the budget pays for. Without a size and a budget, the size is that of ``config``. Fields
    that plans choose keep their values where ``workload`` or ``layout`` gives them; those of a Scenario do not.

    Args:
        config: Model or Scenario whose shape is scaled, see ScenarioLike; None for a public model of ``family``.
        num_devices: Devices of the job: fewer than a node has, or whole nodes.
        num_parameters: Parameters of the model.
        train_tokens: Tokens of the run.
        hours: Budget: hours that the job may take. [h]
        gpu_hours: Budget: hours summed over all devices. [h]
        usd: Budget in dollars; needs ``usd_per_hour``. [USD]
        usd_per_hour: Price of one device. [USD/h]
        family: Prefix of preset names, such as ``llama`` (the default) or ``qwen3``.
        global_batch_tokens: Tokens of one optimizer step; None for a number that suits the run.
        tokenizer_vocab: Entries of the tokenizer; None for the vocabulary of the family. The shape may pad it.
        keep: Values by field: one for a field of the shape, such as ``heads``, one or several for a field of the plan,
            such as ``tensor_parallel``.
        formats: Formats of trainers that shape and plan must be written in, see ``shapewright.app.formats``.
        tolerance_fraction: Largest deviation from the number of parameters.
        guard: Quality guard of the shapes: ``usual``, ``strict`` or ``free``.
        headroom_fraction: Share of a device's memory that plans must leave free.
        straggler_factor: Expected over predicted step time.
        top: Number of designs to list.
        progress: Called with the number of shapes planned and the most that may be.
        parts: See ScenarioParts.

    Returns:
        The answer and its runners-up with their plans, runs and expected losses, and the frontier of loss against time.

    Raises:
        ShapewrightError: an argument is invalid, nothing fits, or no budget and no size are given.
    """
    from shapewright.optimize.design.design import design_model
    from shapewright.optimize.design.request import DesignRequest, budget_device_hours
    from shapewright.workload.recompute import CORE

    source = config.model if isinstance(config, Scenario) else config
    overrides = dict(parts.pop("overrides", None) or {})
    if tokenizer_vocab is not None:
        overrides["vocab_size"] = check_integer("tokenizer_vocab", tokenizer_vocab, 2, error=ConfigError)
    budget = budget_device_hours(num_devices, hours=hours, gpu_hours=gpu_hours, usd=usd, usd_per_hour=usd_per_hour)
    num_parameters = whole_number(num_parameters)
    if num_parameters is None and source is not None and budget is None:
        num_parameters = count_parameters(read_model(source, overrides).config).total
    given, layout = given_fields(parts.get("workload")), given_fields(parts.pop("layout", None))
    keep_shape, keep_plan = _split_kept(keep or {}, given, layout)
    expressible, limits = _keep_expressible(keep_plan, formats, given.get("recompute_modules") or CORE)
    request = DesignRequest(
        num_devices=num_devices,
        num_parameters=num_parameters,
        train_tokens=whole_number(train_tokens),
        budget_device_hours=budget,
        usd_per_hour=usd_per_hour,
        keep_plan=expressible,
        keep_shape=keep_shape,
        tolerance_fraction=tolerance_fraction,
        guard=guard,
        headroom_fraction=headroom_fraction,
        straggler_factor=straggler_factor,
        top=top,
    )
    device = parts.get("device") or (config.device if isinstance(config, Scenario) else None)
    degree = 1 if device is None else min(_MOST_TENSOR_PARALLEL, find_device(device).node_size)
    seq_len = given.get("seq_len")
    positions = seq_len if isinstance(seq_len, int) else _DEFAULT_SEQ_LEN
    model_of = _family(source, family, overrides, tensor_parallel=degree, least_positions=positions)
    start = model_of(num_parameters or _ANY_SIZE)
    _require_loss_law(start)
    if not isinstance(config, Scenario):
        given.setdefault("seq_len", min(_DEFAULT_SEQ_LEN, start.config.max_position_embeddings))
    parts["workload"] = {**given, "phase": "train"}
    base = build_scenario(config.replace(model=start) if isinstance(config, Scenario) else start, **parts)
    return design_model(
        base,
        request,
        model_of=model_of,
        global_batch_size=_batch_size(global_batch_tokens, base),
        refusal=_refusal_of(formats),
        notes=(*(note for note in base.notes if note.code != "model"), *limits),
        progress=progress,
    )


def _split_kept(
    keep: Mapping[str, Any], workload: Mapping[str, Any], layout: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, tuple[Any, ...]]]:
    """Fields of the shape with their value, and fields of the plan with the values that they may take."""
    from shapewright.optimize.plan.request import PLAN_FIELDS, SHORT_NAMES, combine_kept

    shape: dict[str, int] = {}
    plan: dict[str, tuple[Any, ...]] = {}
    for name, value in keep.items():
        field_name = SHORT_NAMES.get(name, name)
        if field_name in PLAN_FIELDS:
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            plan[field_name] = tuple(value) if is_list else (value,)
        else:
            shape[name] = value
    return shape, combine_kept(plan, workload, layout)


def _keep_expressible(
    keep: Mapping[str, tuple[Any, ...]], formats: Sequence[str], recompute_modules: str
) -> tuple[dict[str, tuple[Any, ...]], tuple[Note, ...]]:
    """Restrict the fields of plans to the values that all formats can express, with a note on it."""
    from shapewright.app.formats.output_format import keep_expressible, note_on_limits
    from shapewright.app.formats.registry import find_format

    kept = dict(keep)
    for name in formats:
        kept = keep_expressible(find_format(name), kept, recompute_modules=recompute_modules)
    return kept, note_on_limits(formats, keep, kept)


def _refusal_of(formats: Sequence[str]) -> Callable[[Plan], str]:
    """Make the check of plans against formats: it returns why a plan cannot be written in one, or an empty string."""
    from shapewright.app.formats.registry import write_format

    def refusal(plan: Plan) -> str:
        try:
            for name in formats:
                write_format(name, plan.prediction.config, workload=plan.workload, layout=plan.layout)
        except ShapewrightError as error:
            return str(error)
        return ""

    return refusal


def _family(
    source: ModelLike,
    family: str | None,
    overrides: Mapping[str, object],
    *,
    tensor_parallel: int,
    least_positions: int,
) -> Callable[[int], Model]:
    """Make the function that returns the shape of a family, or of a scaled model, for a number of parameters.

    The tensor degree divides its heads, so that plans can split them. A model of a family has the context window of
    its first training.
    """
    from shapewright.models.write import without_position_scaling
    from shapewright.optimize.search.baseline import family_models, scale_model, scale_nearest

    if source is None:
        models = family_models(family or _DEFAULT_FAMILY, overrides=overrides, least_positions=least_positions)
        return lambda num_parameters: without_position_scaling(
            scale_nearest(models, num_parameters, tensor_parallel), least_positions
        )
    if family is not None:
        raise ConfigError("family has no effect with a model; omit one of them")
    model = read_model(source, overrides)
    _require_loss_law(model)  # before it is scaled, which needs a model of the same kind
    return lambda num_parameters: scale_model(model, num_parameters, tensor_parallel)


def _require_loss_law(model: Model) -> None:
    """Refuse a model whose shapes cannot be compared by loss."""
    from shapewright.prediction.loss.effect import require_loss_law

    require_loss_law(model.config, "search its shapes by speed with 'shapewright search'")


def _batch_size(global_batch_tokens: int | None, base: Scenario) -> int | None:
    """Sequences of a step, as given or from its tokens; None where neither is given and the design chooses."""
    seq_len, given = base.workload.seq_len, base.workload.global_batch_size
    if global_batch_tokens is None:
        return given
    if given is not None:
        raise WorkloadError(
            with_fields("{global_batch_tokens} and {global_batch_size} are both given"), advice="give one of them"
        )
    hint = f"a sequence has {seq_len}; give a multiple of it, such as 4m"
    check_integer("global_batch_tokens", global_batch_tokens, seq_len, error=WorkloadError, hint=hint)
    return round(global_batch_tokens / seq_len)
