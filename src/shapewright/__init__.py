"""Shapewright: which transformer shape fits your hardware, what a bad one costs, and what to use instead."""

__version__ = "0.1.0"
