from __future__ import annotations

from ...analyze.layouts import layouts, reply_of
from ...run.reply import Reply
from ...run.run import open_run
from ..options import RunPath

EPILOG = "Examples: recorder layouts recordings    recorder layouts @-2 --json"


def command(path: RunPath = None) -> Reply:
    """Say how values lie over ranks, and how that is known.

    Each line counts values that lie in one way: their placements over the ranks that share a batch, and the dim along
    which the batches of other ranks lie. The ground is what rows or wrappers say (dtensor, fsdp, ddp), what a
    framework's marks and process groups say (marked), what equal values or shapes suggest (inferred), or what is
    assumed. `recorder show MODULE --where` draws one value. The command looks at the first steps of the run, up to
    200,000 rows of all ranks, and says which.

    Exit code 1: the ranks' values contradict a layout, of which the first value is named, or the run is damaged.
    """
    run = open_run(path)
    return reply_of(run, layouts(run))
