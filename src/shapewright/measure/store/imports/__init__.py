"""Import of measurements from other collectors, and from exports, into a store."""

from shapewright.measure.store.imports.files import import_files as import_files
from shapewright.measure.store.imports.measured import Overrides as Overrides
