"""Tracing of PyTorch modules: run on the meta device, and turn what is dispatched into operations.

Modules here import torch only inside functions.
"""

from shapewright.lowering.torch_trace.trace import Trace as Trace
