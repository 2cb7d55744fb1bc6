"""Typed access to a config.json object, with the defaults of transformers for absent keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.texts import FieldName, joined
from shapewright.models.validate import MAX_NUM_LAYERS, check_count, check_flag, check_probability, check_text


class ConfigValues:
    """Values of a config.json object.

    A value is looked up under several alternative keys. An absent key has the default of the model family; a null key
    means "none" where that is meaningful.

    Attributes:
        model_type: Model type, for messages.
        assumed: Defaults used for absent keys.
    """

    def __init__(self, values: Mapping[str, object], defaults: Mapping[str, object], model_type: str) -> None:
        self._values = values
        self._defaults = defaults
        self.model_type = model_type
        self.assumed: dict[str, object] = {}

    def present_key(self, keys: Sequence[str]) -> str | None:
        """Return the first of several alternative keys that is present, or None."""
        return next((key for key in keys if key in self._values), None)

    def raw(self, *keys: str) -> object:
        """Return the value of the first key that is present, else the default of the family, else None."""
        key = self.present_key(keys)
        if key is not None:
            return self._values[key]
        for key in keys:
            if key in self._defaults:
                self.assumed[key] = self._defaults[key]
                return self._defaults[key]
        return None

    def count(self, *keys: str) -> int:
        """Return a required integer of at least 1.

        Raises:
            ConfigError: it is absent without a default, null, or not an integer of at least 1.
        """
        value = self.raw(*keys)
        if value is None:
            state = "null" if self.present_key(keys) else "missing"
            raise ConfigError(
                joined(map(FieldName, keys), " or ") + f" is {state} in the config of {self.model_type}",
                advice="give an integer",
            )
        return check_count(self._name(keys), value, low=1)

    def optional_count(self, *keys: str) -> int:
        """Return an integer, 0 if it is absent or null; a list of equal integers counts as one.

        Raises:
            ConfigError: not an integer.
        """
        value = self.raw(*keys)
        return 0 if value is None else check_count(self._name(keys), self._common_value(keys, value))

    def num_layers(self, *keys: str) -> int:
        """Return a number of layers, limited so that code may iterate over them.

        Raises:
            ConfigError: as for ``count``, or too many.
        """
        return check_count(self._name(keys), self.count(*keys), low=1, high=MAX_NUM_LAYERS)

    def flag(self, *keys: str) -> bool:
        """Return a boolean, False if it is absent or null.

        Raises:
            ConfigError: neither true nor false.
        """
        value = self.raw(*keys)
        return False if value is None else check_flag(self._name(keys), value)

    def probability(self, *keys: str) -> float:
        """Return a probability, 0 if it is absent or null.

        Raises:
            ConfigError: not a number from 0 to below 1.
        """
        value = self.raw(*keys)
        return 0.0 if value is None else check_probability(self._name(keys), value)

    def text(self, *keys: str) -> str:
        """Return a text, empty if it is absent or null.

        Raises:
            ConfigError: not a text.
        """
        value = self.raw(*keys)
        return "" if value is None else check_text(self._name(keys), value)

    def list_of(self, key: str) -> list[object] | None:
        """Return a list, None if it is absent or null.

        Raises:
            ConfigError: not a list.
        """
        value = self.raw(key)
        if value is None or isinstance(value, list):
            return value
        raise ConfigError(f"{key}={short_repr(value)} must be a list")

    def nested(self, key: str, defaults: Mapping[str, object]) -> ConfigValues:
        """Return a nested object, empty if it is absent or null.

        Raises:
            ConfigError: not an object.
        """
        value = self.raw(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={short_repr(value)} must be an object")
        return ConfigValues(value, defaults, self.model_type)

    def _common_value(self, keys: Sequence[str], value: object) -> object:
        """Return the value shared by all entries of a list; anything but a list unchanged.

        Raises:
            ConfigError: the entries differ.
        """
        if not isinstance(value, list) or not value:
            return value
        if any(type(each) is not type(value[0]) or each != value[0] for each in value):
            raise ConfigError(
                f"{self._name(keys)}={short_repr(value)} differs between layers (not supported); give one number"
            )
        return value[0]

    def _name(self, keys: Sequence[str]) -> str:
        return self.present_key(keys) or keys[0]
