"""Utilization of a measured step: MFU and HFU by every FLOP convention and peak, and the waterfall of losses."""

from shapewright.prediction.utilization.explain import ReachableStep as ReachableStep
from shapewright.prediction.utilization.explain import Utilization as Utilization
from shapewright.prediction.utilization.explain import explain_utilization as explain_utilization
from shapewright.prediction.utilization.kineto import Trace as Trace
from shapewright.prediction.utilization.kineto import read_trace as read_trace
from shapewright.prediction.utilization.rates import LOSSES as LOSSES
from shapewright.prediction.utilization.rates import MITIGATIONS as MITIGATIONS
from shapewright.prediction.utilization.rates import MODEL_PART as MODEL_PART
from shapewright.prediction.utilization.rates import SECONDS as SECONDS
from shapewright.prediction.utilization.rates import ConventionResult as ConventionResult
from shapewright.prediction.utilization.rates import WaterfallPart as WaterfallPart
from shapewright.prediction.utilization.rates import describe_peak as describe_peak
from shapewright.prediction.utilization.rates import read_measurement as read_measurement
from shapewright.prediction.utilization.trace_losses import TraceComparison as TraceComparison
from shapewright.prediction.utilization.trace_losses import TraceLoss as TraceLoss
from shapewright.prediction.utilization.trace_match import MatchedGroup as MatchedGroup
