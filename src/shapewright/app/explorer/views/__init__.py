"""Answers of the API, one function per route: predictions, figures and catalogues."""
