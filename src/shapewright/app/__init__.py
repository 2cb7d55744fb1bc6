"""What users touch: Python API, command line, reports, figures, exports to trainers, explorer."""
