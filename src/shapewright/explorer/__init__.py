"""The explorer: the same functions as the command line, behind a page in the browser and a JSON API.

Nothing is computed here. Requests become questions (job), questions become answers (answers) by the functions that the
commands call, and numbers travel with the text that the commands print.
"""
