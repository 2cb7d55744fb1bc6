"""Workload and parallel layout of a step, with optimizers and recomputation modules."""
