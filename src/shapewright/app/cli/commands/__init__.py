"""The commands, one module each: parse, call the Python API, print."""
