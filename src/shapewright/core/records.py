"""``dataclass`` of the standard library, defined in two thirds of the time.

A command imports 90 to 170 dataclasses, and compiling their generated methods is a tenth of its start-up. Here equality,
hash and text are the same function for all of them; only ``__init__`` and the guards of frozen fields are generated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from operator import attrgetter
    from reprlib import recursive_repr

    def dataclass(cls=None, /, *, eq=True, repr=True, frozen=False, **options):
        """Make a dataclass; arguments are those of ``dataclasses.dataclass`` but for ``order`` and ``unsafe_hash``."""

        def make(cls):
            cls = dataclasses.dataclass(cls, eq=False, repr=False, frozen=frozen, **options)
            if eq:
                _compare_by_fields(cls, is_hashable=frozen)
            if repr and "__repr__" not in cls.__dict__:
                cls.__repr__ = _text
            return cls

        return make if cls is None else make(cls)

    def _compare_by_fields(cls, *, is_hashable):
        """Give a class the equality of its fields, and their hash where they cannot change."""
        names = [field.name for field in dataclasses.fields(cls) if field.compare]
        values = attrgetter(*names) if names else lambda self: ()

        def is_equal(self, other):
            return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

        def hash_of(self):
            return hash(values(self))

        if "__eq__" not in cls.__dict__:
            cls.__eq__ = is_equal
        if "__hash__" not in cls.__dict__:
            cls.__hash__ = hash_of if is_hashable else None

    @recursive_repr()
    def _text(self):
        shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"
