"""The verbs of the command line as functions, taking names as well as objects.

Every verb asks a question (``shapewright.question``): a model, a device, a workload and a layout, completed as the
command line completes them. What a verb needs beyond that is loaded when it runs.
"""

from shapewright.api.devices import compare as compare
from shapewright.api.plans import plan as plan
from shapewright.api.plans import serve_plan as serve_plan
from shapewright.api.shapes import check as check
from shapewright.api.shapes import search as search
from shapewright.api.steps import fits as fits
from shapewright.api.steps import mfu as mfu
from shapewright.api.steps import predict as predict
from shapewright.api.steps import sweep as sweep

__all__ = ["check", "compare", "fits", "mfu", "plan", "predict", "search", "serve_plan", "sweep"]
