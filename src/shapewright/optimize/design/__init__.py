"""Design: a model's shape, the plan of its training job and the length of its run, chosen together.

size and tokens (given, or chosen for a budget) -> alternate searches for shapes and for plans -> rank by loss and time
"""

from shapewright.optimize.design.design import design_model as design_model
from shapewright.optimize.design.request import DesignRequest as DesignRequest
from shapewright.optimize.design.request import budget_device_hours as budget_device_hours
from shapewright.optimize.design.request import usual_batch_size as usual_batch_size
from shapewright.optimize.design.result import Design as Design
from shapewright.optimize.design.result import DesignResult as DesignResult
from shapewright.optimize.design.result import Estimate as Estimate
from shapewright.optimize.design.result import FrontRun as FrontRun
from shapewright.optimize.design.result import Run as Run
