"""Refits of the prediction intervals, from rows that no fit of a record saw."""
