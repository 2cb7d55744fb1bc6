"""Fit calibration records to the rows of a store, and the numerics that all fits share; needs the ``fit`` extra."""
