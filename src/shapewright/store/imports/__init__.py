"""Import: measurements of others, and of this package's older collectors, as rows of a store."""

from shapewright.store.imports.files import import_files as import_files
from shapewright.store.imports.measured import Overrides as Overrides
