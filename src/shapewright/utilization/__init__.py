"""Utilization: from a measured step to MFU and HFU by every convention and peak, and where the rest went."""

from shapewright.utilization.explain import ReachableStep as ReachableStep
from shapewright.utilization.explain import Utilization as Utilization
from shapewright.utilization.explain import explain_utilization as explain_utilization
from shapewright.utilization.measured import SECONDS as SECONDS
from shapewright.utilization.measured import read_measurement as read_measurement
from shapewright.utilization.rates import ConventionResult as ConventionResult
from shapewright.utilization.rates import describe_peak as describe_peak
from shapewright.utilization.waterfall import LOSSES as LOSSES
from shapewright.utilization.waterfall import MODEL_PART as MODEL_PART
from shapewright.utilization.waterfall import WAYS_OUT as WAYS_OUT
from shapewright.utilization.waterfall import WaterfallPart as WaterfallPart
