"""Does a job fit in memory: stage by stage, with the largest sizes that fit and what to change if it does not."""

from shapewright.capacity.fit import Capacity as Capacity
from shapewright.capacity.fit import estimate_capacity as estimate_capacity
from shapewright.capacity.fit import is_tight as is_tight
from shapewright.capacity.offload import Offload as Offload
from shapewright.capacity.remedies import Remedy as Remedy
from shapewright.memory import ALLOCATOR_BAND_FRACTION as ALLOCATOR_BAND_FRACTION
