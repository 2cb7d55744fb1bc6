"""Plans: layouts of a training job over devices, searched in arrays with the same prices as ``predict``."""
