"""Python API: the commands as functions, which take a Scenario, or names and fields to build one from.

Modules that only one function needs are imported when it runs.
"""

from shapewright.app.api.designs import design as design
from shapewright.app.api.parts import ScenarioLike as ScenarioLike
from shapewright.app.api.parts import ScenarioParts as ScenarioParts
from shapewright.app.api.searches import plan as plan
from shapewright.app.api.searches import search as search
from shapewright.app.api.serving import serve_plan as serve_plan
from shapewright.app.api.steps import check as check
from shapewright.app.api.steps import compare as compare
from shapewright.app.api.steps import fits as fits
from shapewright.app.api.steps import mfu as mfu
from shapewright.app.api.steps import predict as predict
from shapewright.app.api.steps import sweep as sweep
from shapewright.app.api.steps import trace as trace
from shapewright.app.api.traffic import serve_traffic as serve_traffic

__all__ = [
    "check",
    "compare",
    "design",
    "fits",
    "mfu",
    "plan",
    "predict",
    "search",
    "serve_plan",
    "serve_traffic",
    "sweep",
    "trace",
]
