"""Reports on searches, training plans and serving plans."""
