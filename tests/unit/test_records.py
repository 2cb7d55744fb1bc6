"""Dataclasses of the package behave as those of the standard library."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import TYPE_CHECKING, Any

import pytest

from shapewright.core import records

if TYPE_CHECKING:
    from collections.abc import Callable


def pair_of(dataclass: Callable[..., Any], **options: Any) -> Any:
    """A class with fields that are left out of comparison, hash and text, made by a decorator."""

    @dataclass(**options)
    class Pair:
        """Two values with remarks."""

        first: int
        second: Any = 2
        remark: str = field(default="", compare=False)
        table: Any = field(default=None, hash=False)
        secret: str = field(default="", repr=False)

    return Pair


VALUES = [
    {"first": 1},
    {"first": 1, "second": 3},
    {"first": 1, "remark": "other"},
    {"first": 1, "table": {}},
    {"first": 1, "secret": "s"},
    {"first": 2},
]


@pytest.mark.parametrize("options", [{"frozen": True, "kw_only": True}, {"frozen": True}, {}, {"eq": False}])
def test_comparison_hash_and_text_are_those_of_the_standard_library(options: dict[str, bool]) -> None:
    """Every pair of values is equal, or has one hash, exactly where the standard library's is; texts are the same."""
    own, standard = (pair_of(dataclass, **options) for dataclass in (records.dataclass, dataclasses.dataclass))
    ones, others = [own(**each) for each in VALUES], [standard(**each) for each in VALUES]

    assert [repr(one) for one in ones] == [repr(other) for other in others]
    assert [[a == b for a in ones] for b in ones] == [[a == b for a in others] for b in others]
    assert (own.__hash__ is None) == (standard.__hash__ is None)
    if own.__hash__ is not None:
        assert [[hash(a) == hash(b) for a in ones] for b in ones] == [
            [hash(a) == hash(b) for a in others] for b in others
        ]
    assert ones[0] != others[0]


def test_fields_of_frozen_instances_cannot_change() -> None:
    """As in the standard library."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair_of(records.dataclass, frozen=True)(1).first = 2


def test_methods_of_the_class_come_first() -> None:
    """Equality, hash and text that a class defines are kept."""

    @records.dataclass(frozen=True)
    class Word:
        text: str

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Word) and other.text.casefold() == self.text.casefold()

        def __hash__(self) -> int:
            return hash(self.text.casefold())

        def __repr__(self) -> str:
            return self.text

    assert Word("A") == Word("a")
    assert len({Word("A"), Word("a")}) == 1
    assert repr(Word("A")) == "A"


def test_an_instance_that_holds_itself_has_a_text() -> None:
    """The inner mention is dots, as in the standard library."""

    @records.dataclass
    class Node:
        children: list[Any]

    node = Node([])
    node.children.append(node)

    assert repr(node).endswith("Node(children=[...])")
