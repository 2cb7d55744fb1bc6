"""Read models, workloads and layouts from the files and command lines of trainers and inference engines.

Files are data: Python is parsed, never run, and checkpoints are not opened.
"""

from shapewright.app.formats.readers.read import READERS as READERS
from shapewright.app.formats.readers.read import parse_job as parse_job
from shapewright.app.formats.readers.read import read_job as read_job
from shapewright.app.formats.readers.reading import Reading as Reading
