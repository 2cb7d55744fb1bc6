"""Lowering: convert a model, a workload and a parallel layout to the operations that one device runs.

Sizes are those of one device after sharding. ``repeats`` counts executions per optimizer step (in prefill and decode,
per pass) on one device of the pipeline stages that the operation names. Nothing here depends on the kind of device.
"""
