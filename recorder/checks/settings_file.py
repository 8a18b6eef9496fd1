"""The file of thresholds and rules of the user's, in TOML: for `recorder check`, and for the triggers of a training."""

from __future__ import annotations

import tomllib
from os import PathLike

from ..errors import ConfigError
from .book import Thresholds, read_table
from .rule import Rule


def read_settings_file(path: str | PathLike[str]) -> tuple[Thresholds, list[type[Rule]]]:
    """Return the thresholds and the rules of a file.

    Raises:
        ConfigError: it cannot be read, is no TOML, or says what no rule has; the message names the nearest.
    """
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no TOML: {error}") from None
    return read_table(table, str(path))
