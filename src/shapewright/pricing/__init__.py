"""Pricing: operations and a device to seconds, with a decomposition and an interval; independent of models."""
