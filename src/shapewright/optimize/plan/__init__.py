"""Plans: layouts of a training job over devices, searched in arrays with the same prices as ``predict``."""

from shapewright.optimize.plan.findings import COST_RESOLUTION as COST_RESOLUTION
from shapewright.optimize.plan.notes import describe_choice as describe_choice
from shapewright.optimize.plan.notes import describe_layout as describe_layout
from shapewright.optimize.plan.notes import describe_plan as describe_plan
from shapewright.optimize.plan.plan import plan_job as plan_job
from shapewright.optimize.plan.request import OBJECTIVES as OBJECTIVES
from shapewright.optimize.plan.request import OFFLOADS as OFFLOADS
from shapewright.optimize.plan.request import PLAN_FIELDS as PLAN_FIELDS
from shapewright.optimize.plan.request import SHORT_NAMES as SHORT_NAMES
from shapewright.optimize.plan.request import PlanRequest as PlanRequest
from shapewright.optimize.plan.request import combine_kept as combine_kept
from shapewright.optimize.plan.request import offload_choices as offload_choices
from shapewright.optimize.plan.request import read_kept as read_kept
from shapewright.optimize.plan.result import BUBBLE as BUBBLE
from shapewright.optimize.plan.result import Breakdown as Breakdown
from shapewright.optimize.plan.result import Difference as Difference
from shapewright.optimize.plan.result import FrontPoint as FrontPoint
from shapewright.optimize.plan.result import Plan as Plan
from shapewright.optimize.plan.result import PlanResult as PlanResult
from shapewright.optimize.plan.result import break_down as break_down
