"""The store of measurements: one SQLite file that any number of benches write and every reader opens; no torch."""
