"""The store of measurements: a SQLite file that several benches can write and all commands can read."""
