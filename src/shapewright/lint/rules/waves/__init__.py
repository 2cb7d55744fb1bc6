"""Rules on tiles, waves and batch sizes (WQ)."""
