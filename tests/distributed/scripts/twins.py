"""Several layouts of `train.py` one after the other in the same processes, each with a store and groups of its own."""

from __future__ import annotations

import os
import sys

import train  # type: ignore[import-not-found]  # beside this file, which runs as a script

# The launcher's store would still hold what the groups of the last layout wrote.
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"

for case in sys.argv[1:]:
    port, *arguments = case.split("|")
    if "--layout=plain" in arguments and os.environ["RANK"] != "0":
        continue
    os.environ["MASTER_PORT"] = port
    sys.argv[1:] = arguments
    train.main()
