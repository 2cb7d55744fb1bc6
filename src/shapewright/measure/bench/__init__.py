"""Benchmarks of operations, layers and steps on a real device; the only package that imports torch."""
