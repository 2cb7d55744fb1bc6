"""The ``dataclass`` of the standard library, whose frozen classes are defined, and made, in a quarter of the time.

A command imports 90 to 170 dataclasses; compiling their generated methods is a tenth of its start-up. Here all classes
share the code of equality, hash, text and the guards of frozen fields; only ``__init__`` is generated. It fills
``__dict__`` at once, where the standard library calls ``object.__setattr__`` for each field of a frozen instance.
Tables of instances that callers share are ReadOnlyDicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

__all__ = ["ReadOnlyDict", "dataclass", "read_only"]
K = TypeVar("K")
V = TypeVar("V")


class ReadOnlyDict(dict[K, V]):
    """A dictionary that refuses changes; unlike ``types.MappingProxyType`` it can be pickled and copied.

    >>> ReadOnlyDict({"fp16": 1.0})["fp16"]
    1.0
    """

    def _refuse(self, *_values: Any, **_named: Any) -> NoReturn:
        raise TypeError("these values are shared and cannot be changed; make a copy with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[ReadOnlyDict[K, V]], tuple[dict[K, V]]]:
        """Pickle and copy by contents: by default the items would be set one by one."""
        return type(self), (dict(self),)


def read_only(value: Any) -> Any:
    """Return a value with ReadOnlyDicts and tuples instead of the dictionaries and lists in it.

    >>> read_only({"tiles": [{"m": 128}]})
    {'tiles': ({'m': 128},)}
    """
    if isinstance(value, dict):
        return ReadOnlyDict({name: read_only(each) for name, each in value.items()})
    return tuple(map(read_only, value)) if isinstance(value, list) else value


if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses
    from operator import attrgetter
    from reprlib import recursive_repr

    def dataclass(cls=None, /, *, eq=True, repr=True, frozen=False, kw_only=False):
        """Make a dataclass; of the options of ``dataclasses.dataclass``, only these and ``kw_only`` are known."""

        def make(cls):
            cls = dataclasses.dataclass(cls, init=False, eq=False, repr=False, kw_only=kw_only)
            if "__init__" not in cls.__dict__:
                cls.__init__ = _make_init(cls)
            if frozen:
                cls.__setattr__, cls.__delattr__ = _refuse_assignment, _refuse_deletion
            if eq:
                _compare_by_fields(cls, is_hashable=frozen)
            if repr and "__repr__" not in cls.__dict__:
                cls.__repr__ = _text
            return cls

        return make if cls is None else make(cls)

    class _Factory:
        """Default of an argument whose field has a factory of defaults."""

        def __repr__(self):
            return "<factory>"

    _FACTORY = _Factory()

    def _make_init(cls):
        """Compile the ``__init__`` of a class."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        positional, keyword, values = [], [], []
        for name, field in fields.items():
            parameter, value = name, name
            if field.default_factory is not dataclasses.MISSING:
                made = f"_fields[{name!r}].default_factory()"
                parameter, value = f"{name}=_FACTORY", f"{made} if {name} is _FACTORY else {name}"
                value = value if field.init else made
            elif field.default is not dataclasses.MISSING:
                parameter = f"{name}=_fields[{name!r}].default"
            if field.init:
                (keyword if field.kw_only else positional).append(parameter)
            if field.init or value != name:  # other defaults stay attributes of the class
                values.append(f"{name}={value}")
        parameters = ["self", *positional, *(["*", *keyword] if keyword else [])]
        lines = [f"def __init__({', '.join(parameters)}):", f" self.__dict__.update({', '.join(values)})"]
        if hasattr(cls, "__post_init__"):
            lines.append(" self.__post_init__()")
        names = {"__name__": cls.__module__, "_fields": fields, "_FACTORY": _FACTORY}
        exec("\n".join(lines), names)
        init = names["__init__"]
        init.__qualname__ = f"{cls.__qualname__}.__init__"
        init.__annotations__ = {**{name: field.type for name, field in fields.items() if field.init}, "return": None}
        return init

    def _refuse_assignment(self, name, value):
        if _is_guarded(self, name):
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def _refuse_deletion(self, name):
        if _is_guarded(self, name):
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)

    def _is_guarded(self, name):
        """Whether an attribute cannot change: a field, and every attribute unless a subclass is no dataclass."""
        cls = type(self)
        return "__dataclass_fields__" in cls.__dict__ or name in cls.__dataclass_fields__

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
