"""Small calculators, each with its formula: parameters, FLOPs, batches, training budgets, communication."""

from shapewright.calculators.batch import BatchRequest as BatchRequest
from shapewright.calculators.batch import BatchSolution as BatchSolution
from shapewright.calculators.batch import bubble_fraction as bubble_fraction
from shapewright.calculators.batch import count_replicas as count_replicas
from shapewright.calculators.batch import solve_batch as solve_batch
from shapewright.calculators.budget import TrainingBudget as TrainingBudget
from shapewright.calculators.budget import count_chinchilla_tokens as count_chinchilla_tokens
from shapewright.calculators.budget import estimate_budget as estimate_budget
from shapewright.calculators.communication import bus_fraction as bus_fraction
from shapewright.calculators.communication import count_gradient_traffic_bytes as count_gradient_traffic_bytes
from shapewright.calculators.communication import count_tensor_parallel_elements as count_tensor_parallel_elements
from shapewright.calculators.flops import FlopsPerToken as FlopsPerToken
from shapewright.calculators.flops import count_flops as count_flops
from shapewright.calculators.parameters import explain_parameters as explain_parameters
from shapewright.calculators.term import Term as Term
