"""Runs all recorded calls of a step again, each from its own inputs: `audit`.

A call whose output cannot be reproduced from its recorded inputs was computed wrongly then, or here: by a broken
machine or a race. One that can be reproduced is what the program makes. torch is loaded when an audit is asked for.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from ...errors import RunError
from ...run.run import Run
from .bundle import RecordedCall, fill_bundle, recorded_calls

REPRODUCED, WITHIN_ROUNDING, NOT_REPRODUCED, CANNOT_TELL = (
    "reproduced",
    "reproduced within rounding",
    "not reproduced",
    "cannot tell",
)


class Audited(NamedTuple):
    """What came of one call."""

    module: str
    step: int
    rank: int
    micro_step: int
    call: int
    verdict: str
    why: str


def audit(
    run: Run, *, step: int, module: str | None = None, rank: int | None = None, factory: str = ""
) -> list[Audited]:
    """Run the recorded calls of a step again.

    Args:
        run: a run with a rule ``keep=replay``.
        step: the step.
        module: one module's path; None: all.
        rank: one rank; None: all.
        factory: ``MODULE:FUNCTION`` that makes the whole model, for classes that are not of torch.nn.

    Raises:
        LookupFailedError: nothing was recorded for a replay.
    """
    calls = recorded_calls(run, step=step, module=module, rank=rank)
    with tempfile.TemporaryDirectory(prefix="recorder-audit-") as temporary:
        return [_audited(run, call, Path(temporary) / str(number), factory) for number, call in enumerate(calls)]


def _audited(run: Run, call: RecordedCall, folder: Path, factory: str) -> Audited:
    from .alone import DIFFERENT, EQUAL, TOTAL, CannotReplay, Options, replay

    def tell(verdict: str, why: str) -> Audited:
        call_key = (call.key["micro_step"] or 0, call.key["call"])
        return Audited(call.module_path, call.step, call.rank, *call_key, verdict, why)

    folder.mkdir()
    try:
        fill_bundle(run, call, folder)
        # A module of torch.nn is made from its settings: a factory may make a large model each time.
        options = Options()
        try:
            compared, notes = replay(folder, options)
        except CannotReplay:
            if not factory:
                raise
            options = Options(factory=factory)
            compared, notes = replay(folder, options)
        wrong = next((one for one in compared if one.verdict == DIFFERENT), None)
        is_repeatable = wrong is None or str(replay(folder, options)[0]) == str(compared)
    except (CannotReplay, RunError) as error:
        return tell(CANNOT_TELL, str(error))
    if wrong is not None:
        elements = f"{wrong.num_differing} of {wrong.numel} elements differ"
        said = f"{wrong.name}: {elements}, by {wrong.largest:.3g} of {wrong.scale:.3g}"
        if not is_repeatable:
            return tell(CANNOT_TELL, f"{said}, and another time by something else: it does not repeat itself here")
        if notes:
            return tell(CANNOT_TELL, "; ".join([said, *notes]))
        return tell(NOT_REPRODUCED, f"{said}, twice alike here: at the time, or here, a machine or a race was at fault")
    counts = Counter(one.verdict for one in compared)
    told = f"{counts[EQUAL]} of {len(compared) - counts[TOTAL]} tensors bit by bit"
    is_exact = counts[EQUAL] + counts[TOTAL] == len(compared)
    return tell(REPRODUCED if is_exact else WITHIN_ROUNDING, "; ".join([told, *notes]))
