"""Config formats of training frameworks: read and write models, workloads and layouts of Megatron-LM and others.

Each format is one module with an ``OutputFormat``, which states what the framework can express, a function that writes
the file and one that reads it. Values that a format cannot express are errors; nothing is dropped silently. Hugging
Face's config.json is written by ``models.to_config_json``.
"""
