"""Reports on one step: prediction, check, memory, comparison, utilization."""
