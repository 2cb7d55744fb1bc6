"""Compare predictions with measured tables, priced as in any prediction; nothing is fitted."""
