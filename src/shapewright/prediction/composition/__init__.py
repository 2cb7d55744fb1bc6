"""Step composition: from priced operations to a step time with overlap, pipeline stages, bubble and interval."""

from shapewright.prediction.composition.stages import COLLECTIVE_POOLS as COLLECTIVE_POOLS
from shapewright.prediction.composition.stages import COMPUTE_POOLS as COMPUTE_POOLS
from shapewright.prediction.composition.stages import EXPERT_EXCHANGES as EXPERT_EXCHANGES
from shapewright.prediction.composition.stages import GRADIENT_GEMMS as GRADIENT_GEMMS
from shapewright.prediction.composition.stages import WEIGHT_GRADIENTS as WEIGHT_GRADIENTS
from shapewright.prediction.composition.stages import PricedOperation as PricedOperation
from shapewright.prediction.composition.stages import combine_stages as combine_stages
from shapewright.prediction.composition.stages import exchange_overlap_fraction as exchange_overlap_fraction
from shapewright.prediction.composition.stages import exposed_fraction as exposed_fraction
from shapewright.prediction.composition.stages import overlap_communication as overlap_communication
from shapewright.prediction.composition.stages import overlap_pools as overlap_pools
from shapewright.prediction.composition.stages import pool_compute_s as pool_compute_s
from shapewright.prediction.composition.stages import rebalance_ends as rebalance_ends
from shapewright.prediction.composition.stages import rebalance_priced_ends as rebalance_priced_ends
from shapewright.prediction.composition.step import ERROR_CORRELATION as ERROR_CORRELATION
from shapewright.prediction.composition.step import STAGES as STAGES
from shapewright.prediction.composition.step import STEP_PARTS as STEP_PARTS
from shapewright.prediction.composition.step import StepTimes as StepTimes
from shapewright.prediction.composition.step import add_exposed_communication as add_exposed_communication
from shapewright.prediction.composition.step import collective_part as collective_part
from shapewright.prediction.composition.step import compose_parts as compose_parts
from shapewright.prediction.composition.step import compose_passes as compose_passes
from shapewright.prediction.composition.step import compose_step as compose_step
from shapewright.prediction.composition.step import compute_part as compute_part
from shapewright.prediction.composition.step import error_correlation as error_correlation
from shapewright.prediction.composition.step import parts_of as parts_of
