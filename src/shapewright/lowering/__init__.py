"""Lowering: convert a model, a workload and a parallel layout to the operations that one device runs.

Sizes are those of one device after sharding. ``repeats`` counts executions per optimizer step (in prefill and decode,
per pass) on one device of the pipeline stages that the operation names. Nothing here depends on the kind of device.
"""

from shapewright.lowering.checks import describe_long_sequence as describe_long_sequence
from shapewright.lowering.checks import max_sequence_length as max_sequence_length
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
