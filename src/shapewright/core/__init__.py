"""Errors, notes, units, element formats, range checks, field documentation, and arithmetic on scalars or arrays."""
