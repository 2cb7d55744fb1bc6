"""Refits of the attention calibration records."""
