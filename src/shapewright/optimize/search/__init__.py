"""Search: shapes of the same size as a baseline that run faster, predicted in arrays.

    request, baseline -> space -> grid -> lowering, parameters and memory traced once -> evaluated in arrays -> best

The formulas are those of lowering, memory, pricing and prediction: tracing (core.traced) runs the same code.
"""

from shapewright.optimize.search.baseline import scale_model as scale_model
from shapewright.optimize.search.baseline import usual_model as usual_model
from shapewright.optimize.search.objective import OBJECTIVES as OBJECTIVES
from shapewright.optimize.search.objective import Goal as Goal
from shapewright.optimize.search.objective import Objective as Objective
from shapewright.optimize.search.request import DEFAULT_VARIED as DEFAULT_VARIED
from shapewright.optimize.search.request import DEFAULT_VARIED_WITH_STAGES as DEFAULT_VARIED_WITH_STAGES
from shapewright.optimize.search.request import VARIED as VARIED
from shapewright.optimize.search.request import VARIED_IN_BRANCHES as VARIED_IN_BRANCHES
from shapewright.optimize.search.request import SearchRequest as SearchRequest
from shapewright.optimize.search.result import Candidate as Candidate
from shapewright.optimize.search.result import SearchResult as SearchResult
from shapewright.optimize.search.search import search_shapes as search_shapes
