"""Rules of the user's beside those that packages bring."""

from __future__ import annotations

from typing import Any, cast

import pytest

from recorder.analyze.check import check as module
from recorder.checks.book import RULES
from recorder.errors import ConfigError


def test_one_of_ones_own_may_not_have_the_name_of_one_that_a_package_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    own = type("Mine", (RULES[0],), {"name": "mine"})
    monkeypatch.setattr(module, "installed_rules", lambda: ([own], []))
    with pytest.raises(ConfigError, match="rule 'mine': a package brings a rule of that name"):
        module.check(cast("Any", None), [], {}, [own])
