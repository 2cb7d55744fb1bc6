"""Refit the calibration records of the package from measured tables: ``python -m shapewright.measure.refit --help``.

For maintainers. Records of a user's own device are fitted by ``shapewright calibrate`` (``shapewright.measure.fit``).
The ``fit`` extra (pandas, scipy, pyarrow, lightgbm) must be installed; nothing outside of this package imports it.
"""
