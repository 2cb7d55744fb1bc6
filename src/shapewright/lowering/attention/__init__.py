"""Lowering of attention blocks: input and output projections, and the core between them."""
