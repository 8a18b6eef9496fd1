"""The form of `_status.json`: what a writer shows of itself while it runs. No row may depend on it."""

from __future__ import annotations

from collections.abc import Mapping

from .rundir import encode_manifest
from .version import FORMAT_NAME, FORMAT_VERSION

STATUS = "_status.json"
STATUS_BYTES = 4096
"""The file always has this size: one block, which the kernel replaces as a whole wherever it can."""
OTHER_REASONS = "other"
"""What drops are called whose reasons have no room."""
_MAX_REASONS = 24
_MAX_ANSWERS = 8
_MAX_TEXT = 200


def encode_status(facts: Mapping[str, object]) -> bytes:
    """The whole file: the JSON of a manifest with its checksum in front, made up to its size by a member of blanks."""
    facts = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in facts.items()}
    dropped = facts.get("dropped")
    for num_reasons, num_commands in ((_MAX_REASONS, _MAX_ANSWERS), (1, _MAX_ANSWERS), (1, 1), (0, 0)):
        if answers := facts.get("commands"):
            facts["commands"] = list(answers)[-num_commands:] if num_commands else []  # type: ignore[call-overload]
        if isinstance(dropped, dict) and len(dropped) > num_reasons:
            facts["dropped"] = _largest(dropped, num_reasons)
        members = {"format": FORMAT_NAME, "version": list(FORMAT_VERSION), **facts, "padding": ""}
        text = encode_manifest(members)
        if len(text) <= STATUS_BYTES:
            break
    else:
        raise ValueError(f"a status of {len(text)} bytes: {STATUS_BYTES} are what it may have")
    return encode_manifest({**members, "padding": " " * (STATUS_BYTES - len(text))})


def _largest(dropped: Mapping[str, int], num_reasons: int) -> dict[str, int]:
    by_count = sorted(dropped.items(), key=lambda item: -item[1])
    kept = {reason[:_MAX_TEXT]: count for reason, count in by_count[:num_reasons]}
    return {**kept, OTHER_REASONS: kept.get(OTHER_REASONS, 0) + sum(count for _, count in by_count[num_reasons:])}
