"""Rules on parallel layouts (PL)."""
