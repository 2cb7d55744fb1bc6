"""From prices to a step: communication that computation hides, stages of a pipeline, ends, bubbles, intervals."""

from shapewright.adding_up.hiding import BESIDE_PRODUCTS as BESIDE_PRODUCTS
from shapewright.adding_up.hiding import EXCHANGES as EXCHANGES
from shapewright.adding_up.hiding import POOLS as POOLS
from shapewright.adding_up.hiding import WANTED_POOLS as WANTED_POOLS
from shapewright.adding_up.hiding import cover_of as cover_of
from shapewright.adding_up.hiding import exposed_fraction as exposed_fraction
from shapewright.adding_up.hiding import hidden_exchange_fraction as hidden_exchange_fraction
from shapewright.adding_up.hiding import hide_communication as hide_communication
from shapewright.adding_up.hiding import pools_of as pools_of
from shapewright.adding_up.priced import PricedOperation as PricedOperation
from shapewright.adding_up.stages import WEIGHT_GRADIENTS as WEIGHT_GRADIENTS
from shapewright.adding_up.stages import join_stages as join_stages
from shapewright.adding_up.stages import settle_ends as settle_ends
from shapewright.adding_up.stages import settle_priced_ends as settle_priced_ends
from shapewright.adding_up.step import ERROR_CORRELATION as ERROR_CORRELATION
from shapewright.adding_up.step import StepTimes as StepTimes
from shapewright.adding_up.step import add_up as add_up
from shapewright.adding_up.step import add_up_passes as add_up_passes
from shapewright.adding_up.step import error_correlation as error_correlation
