"""Prediction of a step: scenarios, composition, capacity, sweeps, comparison, utilization, calculators."""
