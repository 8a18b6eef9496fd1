"""The commands, with their options and their help. A file holds the commands of one subject.

A command NAME is a function ``NAME_command``. The signature gives the command's options, and the docstring is the
command's help. If the function returns a `Reply`, `app` adds the option ``--json`` and prints the reply. A function
that prints by itself returns an exit code. `EXAMPLES` has two or more lines for each command that a reader may type.
`tests/cli/test_help_examples.py` runs them. `SETTINGS`, if present, are passed to typer. A file is imported when one of
its commands is called.
"""

from __future__ import annotations

COMMANDS = {
    "ls": "List the runs of a folder, or the writers of a run.",
    "show": "Show one module over steps and ranks, or a summary of several.",
    "first": "Name the first NaN or infinity, and the first unequal replica.",
    "check": "Say what is wrong with a training, rule by rule.",
    "layouts": "Say how values lie over ranks, and how that is known.",
    "stats": "Show statistics over steps, ranks and modules.",
    "diff": "Compare two runs value by value, whatever their layouts.",
    "align": "Name the module and token at which trainer and engine part.",
    "report": "Draw a run as one HTML file: the loss, maps, lines, ranks.",
    "export": "Write statistics as Parquet, tensors as npz or safetensors.",
    "prove": "Show that a program trains with the recorder as without.",
    "replay": "Run a recorded call of a module again, alone.",
    "set": "Change what a run records while it is under way.",
    "dump": "Have a run write what its memory holds of the last steps.",
    "top": "Watch a run while it records, one line a rank.",
    "view": "Watch runs in a browser while they record.",
    "verify": "Check every byte of a run.",
    "repair": "Seal what killed processes left open.",
    "merge": "Write the global view of a run as a run.",
    "checkpoint": "Write one step's parameters or gradients as torch loads them.",
    "sql": "Ask all runs of a folder, or of a catalog, in SQL.",
    "catalog": "Register runs in an Iceberg catalog, as tables.",
    "daemon": "Ship the runs of this node to a store while they grow.",
    "config": "Print the settings in force, and where each comes from.",
    "init": "Write a TOML file of all settings, each with its default.",
    "doctor": "Say why something was not, or will not be, recorded.",
    "help": "Show what a command does, with its options.",
    "run": "Run a training command with recording on.",
}
"""The first line of each command's help, by the name of the command, in the order of ``recorder --help``."""
FILES = {
    "starting": ("help", "run", "init", "config"),
    "showing": ("ls", "show", "stats", "layouts", "top"),
    "judging": ("first", "check", "doctor"),
    "comparing": ("diff", "align"),
    "pages": ("report", "view"),
    "exporting": ("export", "checkpoint", "sql", "catalog"),
    "proving": ("prove", "replay"),
    "telling": ("set", "dump"),
    "mending": ("verify", "repair", "merge"),
    "daemon": ("daemon",),
}
"""The names of the commands in each file, by the name of the file."""
