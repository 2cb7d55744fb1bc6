"""Time of the grouped GEMMs of mixture-of-experts layers."""
