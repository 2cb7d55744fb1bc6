"""Loss by shape: a law of the training loss by parameters, tokens and shape, and the training time to reach a loss."""
