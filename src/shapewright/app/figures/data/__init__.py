"""Data of figures: samples of operations, predicted grids and sweeps, tile layouts."""
