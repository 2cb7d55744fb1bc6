"""Refits of the GEMM calibration records."""
