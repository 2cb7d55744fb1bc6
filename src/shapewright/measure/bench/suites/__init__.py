"""Benchmark suites: the named sets of cases that the bench measures."""
