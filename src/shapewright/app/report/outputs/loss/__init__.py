"""Outputs about loss: proxy models, the law fitted to them, and experiments."""
