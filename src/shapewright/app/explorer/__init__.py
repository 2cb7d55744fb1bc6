"""The explorer: a browser page and a JSON API over the same functions as the command line.

``requests`` turns a request into a scenario, ``views`` turn the scenario into an answer with the JSON output and the
text of the corresponding command. Nothing is computed here, and the page formats no numbers.
"""
