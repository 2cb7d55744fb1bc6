"""Fit calibration records to measured rows; needs the ``fit`` extra, which is imported where it is used."""
