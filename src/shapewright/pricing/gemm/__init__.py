"""Time of GEMMs: alignment, tiles, waves, operand traffic, choice of kernel."""
