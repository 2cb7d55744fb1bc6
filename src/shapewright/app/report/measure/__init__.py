"""Reports on measurements, calibrations and accuracy."""
