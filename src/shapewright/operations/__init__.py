"""The operations a transformer step is made of: sizes, FLOPs and bytes, and nothing about speed."""

from shapewright.operations.attention import Attention as Attention
from shapewright.operations.collective import Collective as Collective
from shapewright.operations.gemm import Gemm as Gemm
from shapewright.operations.gemm import GroupedGemm as GroupedGemm
from shapewright.operations.pointwise import Pointwise as Pointwise

Operation = Gemm | GroupedGemm | Attention | Pointwise | Collective
