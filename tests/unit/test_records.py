"""Dataclasses of the package behave as those of the standard library."""

from __future__ import annotations

import dataclasses
import inspect
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


@pytest.mark.parametrize("kw_only", [True, False])
def test_arguments_are_those_of_the_standard_library(kw_only: bool) -> None:
    """Names, order, kinds, annotations and errors are the same, and factories are called for each instance."""

    def make(dataclass: Callable[..., Any]) -> Any:
        @dataclass(kw_only=kw_only, frozen=True)
        class Base:
            """A base."""

            first: int
            names: list[str] = field(default_factory=list)

        @dataclass(kw_only=True, frozen=True)
        class Derived(Base):
            """Adds fields that only a keyword gives, or nothing."""

            second: int
            cache: dict[str, int] = field(default_factory=dict, init=False)
            constant: int = field(default=3, init=False)

            def __post_init__(self) -> None:
                self.cache["first"] = self.first

        return Derived

    own, standard = make(records.dataclass), make(dataclasses.dataclass)

    assert str(inspect.signature(own)) == str(inspect.signature(standard))
    one, other = own(first=1, second=2), own(first=1, second=2)
    assert vars(one) == vars(standard(first=1, second=2)) | vars(one)
    assert (one.names, one.cache, one.constant) == ([], {"first": 1}, 3)
    assert one.names is not other.names
    assert dataclasses.asdict(dataclasses.replace(one, names=["a"])) == {**dataclasses.asdict(one), "names": ["a"]}
    with pytest.raises(TypeError) as own_error:
        own()
    with pytest.raises(TypeError) as standard_error:
        standard()
    assert str(own_error.value) == str(standard_error.value)


def test_a_plain_subclass_of_a_frozen_class_has_attributes_of_its_own() -> None:
    """Only the fields are frozen then; deletion is refused as assignment is. As in the standard library."""
    for dataclass in (records.dataclass, dataclasses.dataclass):

        class Named(pair_of(dataclass, frozen=True)):  # type: ignore[misc]
            """Adds an attribute that is no field."""

        one = Named(1)
        one.name = "a"
        del one.name
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'first'"):
            one.first = 2
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'first'"):
            del one.first
