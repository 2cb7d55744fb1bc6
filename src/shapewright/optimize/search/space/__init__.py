"""The space of a search: values of each field, grids of their combinations, and the quality guard."""
