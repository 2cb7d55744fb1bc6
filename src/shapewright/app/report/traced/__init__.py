"""Reports of traced modules: text and pages."""
