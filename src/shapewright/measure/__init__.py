"""Measuring devices, storing rows, fitting calibration records, evaluating accuracy."""
