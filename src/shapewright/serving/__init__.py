"""Serving plans: how many sequences fit, how fast they are answered, on which layout, in which format."""

from shapewright.serving.plan import ServingPlan as ServingPlan
from shapewright.serving.plan import plan_serving as plan_serving
from shapewright.serving.point import OperatingPoint as OperatingPoint
from shapewright.serving.request import ServingFormat as ServingFormat
from shapewright.serving.request import ServingRequest as ServingRequest
from shapewright.serving.request import read_format as read_format
from shapewright.serving.request import usual_formats as usual_formats
from shapewright.serving.speculation import Speculation as Speculation
from shapewright.serving.speculation import expected_tokens_per_pass as expected_tokens_per_pass
