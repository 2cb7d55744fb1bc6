"""Memory of one device: weights, gradients, optimizer states, saved activations, logits and KV cache."""
