"""Rules on alignment and formats for tensor cores (TC)."""
