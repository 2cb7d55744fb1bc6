"""Proxy runs: train small models of given shapes on text, and record their loss and time per step."""
