"""The ``dataclass`` of the standard library, defined in two thirds of the time.

A command imports 90 to 170 dataclasses; compiling their generated methods is a tenth of its start-up. Here all classes
share the code of equality, hash and text; only ``__init__`` and the guards of frozen fields are generated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
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
        fields = dataclasses.fields(cls)
        compared = _getter([field for field in fields if field.compare])
        hashed = _getter([field for field in fields if (field.compare if field.hash is None else field.hash)])

        def is_equal(self, other):
            return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

        def hash_of(self):
            return hash(hashed(self))

        if "__eq__" not in cls.__dict__:
            cls.__eq__ = is_equal
        if "__hash__" not in cls.__dict__:
            cls.__hash__ = hash_of if is_hashable else None

    def _getter(fields):
        """Return the function that returns the values of fields of an instance."""
        return attrgetter(*(field.name for field in fields)) if fields else lambda _: ()

    @recursive_repr()
    def _text(self):
        shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"
