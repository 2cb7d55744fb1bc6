"""Memory capacity: per-stage memory against the device, the largest sizes that fit, and changes that make a job fit."""

from shapewright.memory import ALLOCATOR_BAND_FRACTION as ALLOCATOR_BAND_FRACTION
from shapewright.prediction.capacity.fit import Capacity as Capacity
from shapewright.prediction.capacity.fit import estimate_capacity as estimate_capacity
from shapewright.prediction.capacity.fit import is_tight as is_tight
from shapewright.prediction.capacity.fit_options import FitOption as FitOption
from shapewright.prediction.capacity.fit_options import Offload as Offload
