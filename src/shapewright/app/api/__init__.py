"""Python API: the commands as functions, which take a Scenario, or names and fields to build one from.

``shapewright`` exports them. Modules that only one function needs are imported when it runs.
"""
