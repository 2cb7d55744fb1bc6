"""HfValues: typed access to one config.json object, falling back on what transformers assumes for absent keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shapewright.config.validate import (
    LARGEST_NUM_LAYERS,
    checked_count,
    checked_flag,
    checked_fraction,
    checked_text,
    shown,
)
from shapewright.errors import ConfigError


class HfValues:
    """The values of one model's config.json object.

    Keys are looked up under several spellings, the family's own first. A key that is absent takes the family's
    default; a key that is null counts as "none" where that has a meaning.

    Attributes:
        model_type: The family, for messages.
        assumed: Keys that were absent and took a default, with that default.
    """

    def __init__(self, values: Mapping[str, object], defaults: Mapping[str, object], model_type: str) -> None:
        self._values = values
        self._defaults = defaults
        self.model_type = model_type
        self.assumed: dict[str, object] = {}

    def spelled(self, keys: Sequence[str]) -> str | None:
        """Return the first of several spellings that is present, if any."""
        return next((key for key in keys if key in self._values), None)

    def raw(self, *keys: str) -> object:
        """Return the value under the first spelling that is present, else the family's default, else None."""
        key = self.spelled(keys)
        if key is not None:
            return self._values[key]
        for key in keys:
            if key in self._defaults:
                self.assumed[key] = self._defaults[key]
                return self._defaults[key]
        return None

    def count(self, *keys: str) -> int:
        """Return a whole number that must be there.

        Raises:
            ConfigError: it is absent without a default, null, or no whole number from 1.
        """
        value = self.raw(*keys)
        if value is None:
            state = "null" if self.spelled(keys) else "missing"
            spellings = " or ".join(keys)
            raise ConfigError(f"{spellings} is {state} in the config of {self.model_type}; give a whole number")
        return checked_count(self._name(keys), value, smallest=1)

    def optional_count(self, *keys: str) -> int:
        """Return a whole number, 0 where it is absent or null; of a list the number that all its entries are.

        Raises:
            ConfigError: no whole number.
        """
        value = self.raw(*keys)
        return 0 if value is None else checked_count(self._name(keys), self._agreed(keys, value))

    def num_layers(self, *keys: str) -> int:
        """Return a number of layers, small enough to walk them one by one.

        Raises:
            ConfigError: as for ``count``, or too many.
        """
        return checked_count(self._name(keys), self.count(*keys), smallest=1, largest=LARGEST_NUM_LAYERS)

    def flag(self, *keys: str) -> bool:
        """Return a truth value; absent without a default, or null, is false.

        Raises:
            ConfigError: neither true nor false.
        """
        value = self.raw(*keys)
        return False if value is None else checked_flag(self._name(keys), value)

    def fraction(self, *keys: str) -> float:
        """Return a probability, 0 where it is absent or null.

        Raises:
            ConfigError: no number from 0 to below 1.
        """
        value = self.raw(*keys)
        return 0.0 if value is None else checked_fraction(self._name(keys), value)

    def text(self, *keys: str) -> str:
        """Return a text, empty where it is absent or null.

        Raises:
            ConfigError: no text.
        """
        value = self.raw(*keys)
        return "" if value is None else checked_text(self._name(keys), value)

    def list_of(self, key: str) -> list[object] | None:
        """Return a list, None where it is absent or null.

        Raises:
            ConfigError: no list.
        """
        value = self.raw(key)
        if value is None or isinstance(value, list):
            return value
        raise ConfigError(f"{key}={shown(value)} must be a list")

    def nested(self, key: str, defaults: Mapping[str, object]) -> HfValues:
        """Return an object within this one; an absent or null one is empty.

        Raises:
            ConfigError: no object.
        """
        value = self.raw(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={shown(value)} must be an object")
        return HfValues(value, defaults, self.model_type)

    def _agreed(self, keys: Sequence[str], value: object) -> object:
        """The one value of a list for the layers; anything else as it is.

        Raises:
            ConfigError: layers differ.
        """
        if not isinstance(value, list) or not value:
            return value
        if any(type(each) is not type(value[0]) or each != value[0] for each in value):
            raise ConfigError(
                f"{self._name(keys)}={shown(value)} differs between layers, which is not modelled; give one number"
            )
        return value[0]

    def _name(self, keys: Sequence[str]) -> str:
        return self.spelled(keys) or keys[0]
