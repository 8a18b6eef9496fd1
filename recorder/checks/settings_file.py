"""The file of thresholds and rules of the user's, in TOML: for `recorder check`, and for the triggers of a training."""

from __future__ import annotations

import tomllib
from os import PathLike

from ..config import Loaded
from ..errors import ConfigError
from .book import Thresholds, read_table
from .rule import Rule

_MAX_BYTES = 1 << 20
"""A larger file is none that a person wrote."""


def read_settings_file(path: str | PathLike[str]) -> tuple[Thresholds, list[type[Rule]]]:
    """Return the thresholds and the rules of a file.

    Raises:
        ConfigError: it cannot be read, is no TOML, or says what no rule has; the message names the nearest.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
        table = tomllib.loads(text.decode()) if len(text) <= _MAX_BYTES else None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    except ValueError as error:  # that of TOML, of UTF-8, or of an integer with thousands of digits
        raise ConfigError(f"{path}: is no TOML: {error}") from None
    if table is None:
        raise ConfigError(f"{path}: is larger than {_MAX_BYTES} bytes; expected thresholds and rules in TOML")
    return read_table(table, str(path))


def check_settings(loaded: Loaded) -> tuple[Thresholds, list[type[Rule]]]:
    """Return the thresholds and the rules of the file that the settings name; none where they name none.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong.
    """
    if not loaded.settings.check_settings:
        return {}, []
    try:
        return read_settings_file(loaded.settings.check_settings)
    except ConfigError as error:
        raise ConfigError(f"check_settings ({loaded.sources['check_settings']}): {error}") from None
