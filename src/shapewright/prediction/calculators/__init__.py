"""Small calculators, each with its formula: parameters, FLOPs, batches, training budgets, communication."""
