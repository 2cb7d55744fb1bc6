"""Refits of the expert-layer (MoE) calibration records."""
