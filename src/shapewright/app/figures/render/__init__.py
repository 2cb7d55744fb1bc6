"""Renderers of chart descriptions."""
