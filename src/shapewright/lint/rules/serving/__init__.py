"""Rules about what inference engines can load and start."""
