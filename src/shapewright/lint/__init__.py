"""Lint: rules on shapes and layouts, with the predicted cost of each finding and suggestions."""
