"""Measure the package's own operations on a real device, and keep every number; the only home of torch."""
