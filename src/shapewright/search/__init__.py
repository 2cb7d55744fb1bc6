"""Search: shapes of the same size that run faster, all of them priced in arrays.

    request, baseline -> space -> grid -> (lowering, parameters and memory traced once) -> sums of arrays -> the best

The formulas are those of lowering, perf, memory and predict: tracing runs that very code (search.trace).
"""

from shapewright.search.baseline import scale_model as scale_model
from shapewright.search.baseline import usual_model as usual_model
from shapewright.search.request import DEFAULT_VARIED as DEFAULT_VARIED
from shapewright.search.request import DEFAULT_VARIED_WITH_STAGES as DEFAULT_VARIED_WITH_STAGES
from shapewright.search.request import OBJECTIVES as OBJECTIVES
from shapewright.search.request import VARIED as VARIED
from shapewright.search.request import VARIED_IN_BRANCHES as VARIED_IN_BRANCHES
from shapewright.search.request import SearchRequest as SearchRequest
from shapewright.search.request import phase_of as phase_of
from shapewright.search.result import Candidate as Candidate
from shapewright.search.result import SearchResult as SearchResult
from shapewright.search.search import search_shapes as search_shapes
