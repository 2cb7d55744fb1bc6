"""Serving plans: sequences that fit, latency and throughput by layout, format, batch and chunking of prompts."""

from shapewright.optimize.serving.adapters import Adapters as Adapters
from shapewright.optimize.serving.plan import ServingPlan as ServingPlan
from shapewright.optimize.serving.plan import plan_serving as plan_serving
from shapewright.optimize.serving.point import OperatingPoint as OperatingPoint
from shapewright.optimize.serving.recommend import Fleet as Fleet
from shapewright.optimize.serving.recommend import Recommendation as Recommendation
from shapewright.optimize.serving.request import ServingFormat as ServingFormat
from shapewright.optimize.serving.request import ServingRequest as ServingRequest
from shapewright.optimize.serving.request import Speculation as Speculation
from shapewright.optimize.serving.request import expected_tokens_per_pass as expected_tokens_per_pass
from shapewright.optimize.serving.request import read_format as read_format
from shapewright.optimize.serving.request import usual_formats as usual_formats
