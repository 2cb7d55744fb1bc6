"""Time of fused attention: prefill and training kernels, decode kernels."""
