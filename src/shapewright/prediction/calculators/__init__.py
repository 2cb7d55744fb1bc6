"""Small calculators, each with its formula: parameters, FLOPs, batches, training budgets, communication."""

from shapewright.prediction.calculators.flops import FlopsPerToken as FlopsPerToken
from shapewright.prediction.calculators.flops import bus_fraction as bus_fraction
from shapewright.prediction.calculators.flops import count_flops as count_flops
from shapewright.prediction.calculators.flops import count_gradient_traffic_bytes as count_gradient_traffic_bytes
from shapewright.prediction.calculators.flops import count_tensor_parallel_elements as count_tensor_parallel_elements
from shapewright.prediction.calculators.parameters import Term as Term
from shapewright.prediction.calculators.parameters import explain_parameters as explain_parameters
from shapewright.prediction.calculators.training import BatchRequest as BatchRequest
from shapewright.prediction.calculators.training import BatchSolution as BatchSolution
from shapewright.prediction.calculators.training import TrainingBudget as TrainingBudget
from shapewright.prediction.calculators.training import bubble_fraction as bubble_fraction
from shapewright.prediction.calculators.training import count_replicas as count_replicas
from shapewright.prediction.calculators.training import estimate_budget as estimate_budget
from shapewright.prediction.calculators.training import solve_batch as solve_batch
