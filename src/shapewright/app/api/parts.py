"""Arguments that the functions of the Python API share: what a scenario is made of, and fields of its parts."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, TypedDict, TypeVar, cast

from shapewright.core.errors import close_names
from shapewright.models.read import ModelLike
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.build import DeviceLike
from shapewright.prediction.scenario import Scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

ScenarioLike = ModelLike | Scenario
"""A Scenario, or the model of one: preset, config.json or its folder or content, hub id, Model, TransformerConfig."""
F = TypeVar("F", bound=Callable[..., Any])


class ScenarioParts(TypedDict, total=False):
    """Keyword arguments that build a Scenario, or replace parts and fields of the Scenario given as first argument.

    Attributes:
        device: Device name, alias, file, or Device; required unless the first argument is a Scenario.
        workload: Workload, or some of its fields; the others get defaults that suit model and device.
        layout: ParallelLayout, or some of its fields.
        overrides: TransformerConfig fields to change.
        uncalibrated: Price without the device's own measurements.
        software: Generation of the training software, such as ``fsdp-2024``; by default ``tuned``.
        physics_only: Price by formulas alone, without learned residuals.
    """

    device: DeviceLike | None
    workload: Workload | Mapping[str, Any] | None
    layout: ParallelLayout | Mapping[str, Any] | None
    overrides: Mapping[str, object] | None
    uncalibrated: bool
    software: str | None
    physics_only: bool


_REFERENCE = re.compile(r" *parts: See ScenarioParts\.\n")
_DESCRIPTIONS = (ScenarioParts.__doc__ or "").partition("Attributes:\n")[2].rstrip()


def takes_scenario(function: F) -> F:
    """List the keys of ScenarioParts in the signature and the docstring of a function or ``__init__``.

    The function declares them as ``**parts: Unpack[ScenarioParts]``, which type checkers understand, and documents them
    as ``parts: See ScenarioParts.``
    """
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    shared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if name in ("uncalibrated", "physics_only") else None,
            annotation=annotation.__forward_arg__,
        )
        for name, annotation in ScenarioParts.__annotations__.items()
        if name not in signature.parameters
    ]
    known = {one.name for one in (*own, *shared)} - {"self"}
    title = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*values: Any, **keywords: Any) -> Any:
        for name in keywords.keys() - known:
            raise TypeError(_suggest_keyword(title, name, keywords[name], known))
        return function(*values, **keywords)

    checked.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    checked.__doc__ = _REFERENCE.sub(lambda _: f"{_DESCRIPTIONS}\n", function.__doc__ or "", count=1)
    return cast("F", checked)


def _suggest_keyword(function: str, name: str, value: Any, known: Collection[str]) -> str:
    """Message on an unknown keyword: the argument that has a field of this name, or similar names."""
    from shapewright.app.report.flags import field_named

    spellings = field_named(name), field_named(name.removeprefix("num_"))  # num_gpus is gpus
    spelled = next((each for each in spellings if each in known), spellings[0])
    groups = {"workload": Workload, "layout": ParallelLayout, "overrides": TransformerConfig}
    homes = {spec.name: argument for argument, cls in groups.items() if argument in known for spec in fields(cls)}
    if spelled in homes:
        hint = f"{spelled} is a field: {homes[spelled]}={{{spelled!r}: {value!r}}}"
    elif not (hint := close_names(spelled, known)) and (hint := close_names(spelled, homes)):
        named = dict.fromkeys(f"{homes[field]}={{...}}" for field in homes if repr(field) in hint)
        hint += f" fields are given as {' or '.join(named)}"
    return f"{function}() has no argument {name!r}; {hint or 'it takes ' + ', '.join(sorted(known))}"


def given_fields(given: object) -> dict[str, Any]:
    """Fields of a workload or layout that is given as a whole or in part."""
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    return {spec.name: getattr(given, spec.name) for spec in fields(given)}  # type: ignore[arg-type]
