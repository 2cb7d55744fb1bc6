"""Experiments: small models to train, whose losses would decide between shapes."""
