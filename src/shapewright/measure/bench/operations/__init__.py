"""Preparation of operations, layers and steps for measurement in PyTorch."""
