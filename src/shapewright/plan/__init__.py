"""Plans: how to spread a training job over devices, searched in arrays and priced as ``predict`` prices one."""

from shapewright.plan.breakdown import BUBBLE as BUBBLE
from shapewright.plan.breakdown import Breakdown as Breakdown
from shapewright.plan.breakdown import Difference as Difference
from shapewright.plan.breakdown import break_down as break_down
from shapewright.plan.findings import COST_RESOLUTION as COST_RESOLUTION
from shapewright.plan.plan import FrontPoint as FrontPoint
from shapewright.plan.plan import Plan as Plan
from shapewright.plan.plan import PlanResult as PlanResult
from shapewright.plan.plan import plan_job as plan_job
from shapewright.plan.request import OBJECTIVES as OBJECTIVES
from shapewright.plan.request import OFFLOADS as OFFLOADS
from shapewright.plan.request import SEARCHED as SEARCHED
from shapewright.plan.request import SHORT_NAMES as SHORT_NAMES
from shapewright.plan.request import PlanRequest as PlanRequest
from shapewright.plan.request import keep_given as keep_given
from shapewright.plan.request import offload_choices as offload_choices
from shapewright.plan.request import read_kept as read_kept
from shapewright.plan.words import describe_choice as describe_choice
from shapewright.plan.words import describe_layout as describe_layout
