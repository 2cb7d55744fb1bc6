# Array shapes are documentation to the type checker: Float[np.ndarray, "rows columns"] is an np.ndarray to it.
# The package imports jaxtyping under TYPE_CHECKING only, so that neither users nor mypy need it installed.
from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int
from typing import Annotated as Num

__all__ = ["Bool", "Float", "Int", "Num"]
