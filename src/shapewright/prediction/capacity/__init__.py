"""Memory capacity: per-stage memory against the device, the largest sizes that fit, and changes that make a job fit."""
