"""Formats: a shape, its batch and its layout as the training frameworks spell them.

Each format is one file with a ``Form`` (what the framework can express) and a function that writes. What it cannot
express is an error that says so: nothing is left out in silence. Hugging Face's config.json is ``config.write_back``.
"""

from shapewright.formats.form import Form as Form
from shapewright.formats.write import FORMATS as FORMATS
from shapewright.formats.write import RUN_FORMATS as RUN_FORMATS
from shapewright.formats.write import check_format as check_format
from shapewright.formats.write import write_format as write_format
