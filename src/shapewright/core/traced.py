"""Tracing: run scalar code once for a representative shape, and record its results as expressions over many shapes.

A ``Traced`` number behaves as the number of the representative shape and records the expression that computes it.
Where the code needs a concrete value (a branch, the length of a range), the tape records a guard: the expression and
its value. For every shape on which all guards have the same values, evaluating the expressions gives exactly what
the code would have computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    # name: function on scalars of the representative shape, function on arrays
    "add": (operator.add, np.add),
    "sub": (operator.sub, np.subtract),
    "mul": (operator.mul, np.multiply),
    "floordiv": (operator.floordiv, np.floor_divide),
    "truediv": (operator.truediv, np.true_divide),
    "mod": (operator.mod, np.remainder),
    "pow": (operator.pow, np.power),
    "or": (operator.or_, np.bitwise_or),
    "rshift": (operator.rshift, np.right_shift),
    "lt": (operator.lt, np.less),
    "le": (operator.le, np.less_equal),
    "gt": (operator.gt, np.greater),
    "ge": (operator.ge, np.greater_equal),
    "eq": (operator.eq, np.equal),
    "ne": (operator.ne, np.not_equal),
    "round": (round, lambda number, _: np.rint(number).astype(np.int64)),
}


class Node:
    """One operation of an expression; equal operations on one tape share one node.

    Attributes:
        op: ``variable``, ``constant``, or a key of ``_OPERATORS``.
        args: Name of the variable, value of the constant, or the two operands.
        variables: Names of the variables in the expression.
    """

    __slots__ = ("args", "op", "variables")

    def __init__(self, op: str, args: tuple[Any, ...], variables: frozenset[str]) -> None:
        self.op, self.args, self.variables = op, args, variables

    def __repr__(self) -> str:
        return f"Node({self.op}, {', '.join(map(repr, self.args))})"


class Guard(NamedTuple):
    """An expression whose value the traced code needed, with its value for the representative shape."""

    node: Node
    outcome: Any


class Tape:
    """The nodes and guards recorded in one run."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []
        self._nodes: dict[tuple[Any, ...], Node] = {}
        self._guarded: set[Node] = set()
        self._minus_one = self.node_for(-1)

    def variable(self, name: str, value: int) -> Traced:
        """Create a number that differs between shapes, with its value for the representative shape."""
        return Traced(self, self._intern(("variable", name), "variable", (name,), frozenset({name})), value)

    def node_for(self, number: Any) -> Node:
        """Return the node of a traced number, or a constant node for a plain one."""
        if isinstance(number, Traced):
            return number.node
        return self._intern(("constant", type(number), number), "constant", (number,), frozenset())

    def apply(self, op: str, left: Any, right: Any) -> Traced:
        """Record an operation; multiplying or dividing an integer by 1, a frequent case, records nothing."""
        if op in ("mul", "floordiv") and type(right) is int and right == 1 and type(untraced(left)) is int:
            assert isinstance(left, Traced)
            return left
        first, second = self.node_for(left), self.node_for(right)
        node = self._intern((op, first, second), op, (first, second), first.variables | second.variables)
        return Traced(self, node, _OPERATORS[op][0](untraced(left), untraced(right)))

    def negate(self, number: Traced) -> Traced:
        """Record a negation; a double negation returns the original node."""
        if number.node.op == "mul" and number.node.args[1] is self._minus_one:
            return Traced(self, number.node.args[0], -number.value)
        return self.apply("mul", number, -1)

    def guard(self, number: Traced) -> Any:
        """Return the value for the representative shape, and record it as a guard."""
        if number.node not in self._guarded:
            self._guarded.add(number.node)
            self.guards.append(Guard(number.node, number.value))
        return number.value

    def _intern(self, key: tuple[Any, ...], op: str, args: tuple[Any, ...], variables: frozenset[str]) -> Node:
        if key not in self._nodes:
            self._nodes[key] = Node(op, args, variables)
        return self._nodes[key]


def untraced(number: Any) -> Any:
    """Return the value for the representative shape, without recording a guard."""
    return number.value if isinstance(number, Traced) else number


class Traced:
    """A number of the representative shape that records the expression that computes it.

    >>> tape = Tape()
    >>> width = tape.variable("width", 2560)
    >>> rows = -(-width // 3)
    >>> rows.value, evaluate(rows.node, {"width": np.array([6, 7])}).tolist()
    (854, [2, 3])
    >>> max(width, 100) is width, [(guard.node.op, guard.outcome) for guard in tape.guards]
    (True, [('lt', False)])
    """

    __slots__ = ("node", "tape", "value")

    def __init__(self, tape: Tape, node: Node, value: Any) -> None:
        self.tape, self.node, self.value = tape, node, value

    def __repr__(self) -> str:
        return repr(self.value)

    def __add__(self, other: Any) -> Traced:
        return self.tape.apply("add", self, other)

    def __radd__(self, other: Any) -> Traced:
        return self.tape.apply("add", other, self)

    def __sub__(self, other: Any) -> Traced:
        return self.tape.apply("sub", self, other)

    def __rsub__(self, other: Any) -> Traced:
        return self.tape.apply("sub", other, self)

    def __mul__(self, other: Any) -> Traced:
        return self.tape.apply("mul", self, other)

    def __rmul__(self, other: Any) -> Traced:
        return self.tape.apply("mul", other, self)

    def __floordiv__(self, other: Any) -> Traced:
        return self.tape.apply("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Traced:
        return self.tape.apply("floordiv", other, self)

    def __truediv__(self, other: Any) -> Traced:
        return self.tape.apply("truediv", self, other)

    def __rtruediv__(self, other: Any) -> Traced:
        return self.tape.apply("truediv", other, self)

    def __mod__(self, other: Any) -> Traced:
        return self.tape.apply("mod", self, other)

    def __rmod__(self, other: Any) -> Traced:
        return self.tape.apply("mod", other, self)

    def __pow__(self, other: Any) -> Traced:
        return self.tape.apply("pow", self, other)

    def __rpow__(self, other: Any) -> Traced:
        return self.tape.apply("pow", other, self)

    def __or__(self, other: Any) -> Traced:
        return self.tape.apply("or", self, other)

    def __rshift__(self, other: Any) -> Traced:
        return self.tape.apply("rshift", self, other)

    def __round__(self, digits: None = None) -> Traced:
        return self.tape.apply("round", self, digits)

    def __neg__(self) -> Traced:
        return self.tape.negate(self)

    def __lt__(self, other: Any) -> Traced:
        return self.tape.apply("lt", self, other)

    def __le__(self, other: Any) -> Traced:
        return self.tape.apply("le", self, other)

    def __gt__(self, other: Any) -> Traced:
        return self.tape.apply("gt", self, other)

    def __ge__(self, other: Any) -> Traced:
        return self.tape.apply("ge", self, other)

    def __eq__(self, other: object) -> Any:
        return self.tape.apply("eq", self, other)

    def __ne__(self, other: object) -> Any:
        return self.tape.apply("ne", self, other)

    def __divmod__(self, other: Any) -> tuple[Traced, Traced]:
        return self // other, self % other

    def __bool__(self) -> bool:
        if isinstance(self.value, bool):
            return bool(self.tape.guard(self))
        return bool(self.tape.guard(self.tape.apply("ne", self, 0)))

    # These need the concrete value, so they restrict the trace to shapes with the same value.
    def __hash__(self) -> int:
        return hash(self.tape.guard(self))

    def __index__(self) -> int:
        return operator.index(self.tape.guard(self))

    def __int__(self) -> int:
        return int(self.tape.guard(self))

    def __float__(self) -> float:
        return float(self.tape.guard(self))


def evaluate(
    node: Node, values: Mapping[str, NDArray[Any]], memo: dict[Node, NDArray[Any]] | None = None
) -> NDArray[Any]:
    """Evaluate an expression over arrays.

    Args:
        values: An array for each variable; they broadcast together.
        memo: Results already computed over the same arrays; new results are added.
    """
    memo = {} if memo is None else memo
    if node not in memo:
        if node.op == "variable":
            memo[node] = values[node.args[0]]
        elif node.op == "constant":
            memo[node] = np.asarray(node.args[0])
        else:
            left, right = (evaluate(argument, values, memo) for argument in node.args)
            memo[node] = _OPERATORS[node.op][1](left, right)
    return memo[node]


_MAX_TERMS = 256


def sum_of_products(node: Node) -> list[list[Node]]:
    """Expand an expression into a sum of products; terms with too many products stay as they are.

    A subtracted term is a product with -1.

    >>> tape = Tape()
    >>> a, b, c = (tape.variable(name, 1) for name in "abc")
    >>> [[factor.args[0] for factor in product] for product in sum_of_products((a * (b + c)).node)]
    [['a', 'b'], ['a', 'c']]
    """
    if node.op == "add":
        return sum_of_products(node.args[0]) + sum_of_products(node.args[1])
    if node.op == "sub":
        return sum_of_products(node.args[0]) + [[*product, _MINUS_ONE] for product in sum_of_products(node.args[1])]
    if node.op == "truediv" and node.args[1].op == "constant":
        inverse = Node("constant", (1.0 / node.args[1].args[0],), frozenset())
        return [[*product, inverse] for product in sum_of_products(node.args[0])]
    if node.op == "mul":
        left, right = sum_of_products(node.args[0]), sum_of_products(node.args[1])
        if len(left) * len(right) <= _MAX_TERMS:
            return [[*first, *second] for first in left for second in right]
    return [[node]]


_MINUS_ONE = Node("constant", (-1,), frozenset())
