"""JSON output: one dataclass per command, in the order of its keys, with a description of every field.

The JSON itself, its schema and docs/json.md are generated from these classes; tables and pages print from the same
objects.
"""
