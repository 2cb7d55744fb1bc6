"""Config formats of training frameworks: write a model, workload and layout for Megatron-LM, GPT-NeoX and others.

Each format is one module with an ``OutputFormat``, which states what the framework can express, and a function that
writes the file. Values that a format cannot express are errors; nothing is dropped silently. Hugging Face's
config.json is written by ``models.to_config_json``.
"""

from shapewright.app.formats.output_format import OutputFormat as OutputFormat
from shapewright.app.formats.output_format import keep_expressible as keep_expressible
from shapewright.app.formats.write import FORMATS as FORMATS
from shapewright.app.formats.write import RUN_FORMATS as RUN_FORMATS
from shapewright.app.formats.write import check_format as check_format
from shapewright.app.formats.write import find_format as find_format
from shapewright.app.formats.write import write_format as write_format
