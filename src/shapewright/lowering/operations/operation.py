"""Operation: any operation of a step."""

from __future__ import annotations

from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.lowering.operations.sparse import SparseAttention

Operation = Gemm | GroupedGemm | Attention | SparseAttention | Scan | CausalConv | Pointwise | Collective
