"""Workload and parallel layout of a step, with optimizers and recomputation modules."""

from shapewright.workload.layout import ParallelLayout as ParallelLayout
from shapewright.workload.workload import Workload as Workload
