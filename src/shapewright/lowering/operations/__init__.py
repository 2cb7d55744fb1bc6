"""Operations of a transformer step: their sizes, FLOPs and bytes. Their speed is the subject of pricing."""

from shapewright.lowering.operations.attention import Attention as Attention
from shapewright.lowering.operations.base import MEANING_FIELDS as MEANING_FIELDS
from shapewright.lowering.operations.base import UNPRICED_FIELDS as UNPRICED_FIELDS
from shapewright.lowering.operations.collective import Collective as Collective
from shapewright.lowering.operations.gemm import Gemm as Gemm
from shapewright.lowering.operations.gemm import GroupedGemm as GroupedGemm
from shapewright.lowering.operations.pointwise import LOG_SOFTMAX as LOG_SOFTMAX
from shapewright.lowering.operations.pointwise import Pointwise as Pointwise
from shapewright.lowering.operations.scan import SCAN_RULES as SCAN_RULES
from shapewright.lowering.operations.scan import CausalConv as CausalConv
from shapewright.lowering.operations.scan import Scan as Scan
from shapewright.lowering.operations.sparse import SparseAttention as SparseAttention

Operation = Gemm | GroupedGemm | Attention | SparseAttention | Scan | CausalConv | Pointwise | Collective
