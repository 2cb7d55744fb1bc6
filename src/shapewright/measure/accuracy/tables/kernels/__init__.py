"""Tables of kernels that are priced by their work (pricing.kernels)."""
