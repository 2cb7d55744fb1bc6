"""Time of measured kernels that have no formula of their own: weighted terms of work, and a residual table."""
