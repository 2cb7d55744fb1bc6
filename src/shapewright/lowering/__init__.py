"""Lowering: the map from a model, a workload and a layout to the operations that one device runs.

It knows models and no device. Every name is a module path, every size is what is left after slicing, every number of
repeats is per optimiser step (or per pass in prefill and decode) on one device of the stage that the operation names.
"""

from shapewright.lowering.backward import is_weight_gradient as is_weight_gradient
from shapewright.lowering.checks import describe_overlong as describe_overlong
from shapewright.lowering.checks import longest_sequence as longest_sequence
from shapewright.lowering.checks import possible_degrees as possible_degrees
from shapewright.lowering.checks import validate_layout as validate_layout
from shapewright.lowering.checks import validate_lengths as validate_lengths
from shapewright.lowering.counts import LayerCounts as LayerCounts
from shapewright.lowering.counts import count_encoder_layers as count_encoder_layers
from shapewright.lowering.counts import count_layers as count_layers
from shapewright.lowering.counts import layers_per_stage as layers_per_stage
from shapewright.lowering.counts import num_microbatches as num_microbatches
from shapewright.lowering.counts import spare_layers as spare_layers
from shapewright.lowering.flops import count_hardware_flops as count_hardware_flops
from shapewright.lowering.flops import count_masked_fraction as count_masked_fraction
from shapewright.lowering.flops import count_model_flops as count_model_flops
from shapewright.lowering.flops import count_step_flops as count_step_flops
from shapewright.lowering.model import StepParts as StepParts
from shapewright.lowering.model import lower as lower
from shapewright.lowering.model import lower_parts as lower_parts
