"""The device under test: opening it, timing on it, input tensors, and facts about it."""
