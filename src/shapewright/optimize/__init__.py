"""Better shapes and layouts: search, training plans, serving plans."""
