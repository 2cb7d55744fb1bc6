"""Model families: how the config.json of each model type is read."""
