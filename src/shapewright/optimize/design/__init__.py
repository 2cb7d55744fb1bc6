"""Design: a model's shape, the plan of its training job and the length of its run, chosen together.

size and tokens (given, or chosen for a budget) -> alternate searches for shapes and for plans -> rank by loss and time
"""
