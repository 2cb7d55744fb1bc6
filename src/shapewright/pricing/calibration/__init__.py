"""Calibration records: loading, donor selection, transfer to unmeasured devices, residual tables, intervals."""
