"""Config formats of training frameworks: read and write models, workloads and layouts of Megatron-LM and others.

Each format is one module with an ``OutputFormat``, which states what the framework can express, a function that writes
the file and one that reads it. Values that a format cannot express are errors; nothing is dropped silently. Hugging
Face's config.json is written by ``models.to_config_json``.
"""

from shapewright.app.formats.output_format import OutputFormat as OutputFormat
from shapewright.app.formats.output_format import fused_as_trained as fused_as_trained
from shapewright.app.formats.output_format import keep_expressible as keep_expressible
from shapewright.app.formats.output_format import note_on_limits as note_on_limits
from shapewright.app.formats.reading import Reading as Reading
from shapewright.app.formats.registry import FORMATS as FORMATS
from shapewright.app.formats.registry import READERS as READERS
from shapewright.app.formats.registry import RUN_FORMATS as RUN_FORMATS
from shapewright.app.formats.registry import check_format as check_format
from shapewright.app.formats.registry import find_format as find_format
from shapewright.app.formats.registry import is_job_file as is_job_file
from shapewright.app.formats.registry import parse_job as parse_job
from shapewright.app.formats.registry import read_job as read_job
from shapewright.app.formats.registry import write_format as write_format
