"""Models: hyperparameters, readers and writers of config.json, presets, and parameter counts."""
