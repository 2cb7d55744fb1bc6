"""Memory of one device: weights, gradients, optimizer states, saved activations, logits and KV cache."""

from shapewright.memory.activations import ActivationTerms as ActivationTerms
from shapewright.memory.activations import LayerBytes as LayerBytes
from shapewright.memory.activations import count_microbatches_in_flight as count_microbatches_in_flight
from shapewright.memory.activations import estimate_activation_terms as estimate_activation_terms
from shapewright.memory.activations import estimate_layer as estimate_layer
from shapewright.memory.estimate import ALLOCATOR_BAND_FRACTION as ALLOCATOR_BAND_FRACTION
from shapewright.memory.estimate import CUDA_CONTEXT_BYTES as CUDA_CONTEXT_BYTES
from shapewright.memory.estimate import MemoryEstimate as MemoryEstimate
from shapewright.memory.estimate import count_cached_elements as count_cached_elements
from shapewright.memory.estimate import estimate_memory as estimate_memory
from shapewright.memory.estimate import estimate_stages as estimate_stages
from shapewright.memory.saved_tensors import list_layer_tensors as list_layer_tensors
from shapewright.memory.saved_tensors import list_saved_tensors as list_saved_tensors
from shapewright.memory.stages import Stage as Stage
from shapewright.memory.stages import peak_stage_candidates as peak_stage_candidates
from shapewright.memory.states import StateBytes as StateBytes
from shapewright.memory.states import count_stage_parameters as count_stage_parameters
from shapewright.memory.states import count_trained_parameters as count_trained_parameters
from shapewright.memory.states import estimate_states as estimate_states
from shapewright.memory.tensors import SavedTensor as SavedTensor
from shapewright.workload.optimizers import OPTIMIZERS as OPTIMIZERS
from shapewright.workload.optimizers import TrainingRecipe as TrainingRecipe
from shapewright.workload.optimizers import find_recipe as find_recipe
