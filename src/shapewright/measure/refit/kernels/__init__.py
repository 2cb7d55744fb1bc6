"""Refits of the records of kernels that are priced by their work."""
