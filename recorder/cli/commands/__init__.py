"""The commands, with their options and their help. A file holds the commands of one subject.

A command NAME is a function ``NAME_command``. The signature gives the command's options, and the docstring is the
command's help. If the function returns a `Reply`, `app` adds the option ``--json`` and prints the reply. A function
that prints by itself returns an exit code. `EXAMPLES` has two or more lines for each command that a reader may type.
`tests/cli/test_help_examples.py` runs them. `SETTINGS`, if present, are passed to typer. A file is imported when one of
its commands is called.
"""

from __future__ import annotations

COMMANDS = {
    "ls": ("showing", "List the runs of a folder, or the writers of a run."),
    "show": ("showing", "Show one module over steps and ranks, or a summary of several."),
    "first": ("judging", "Name the first NaN or infinity, and the first unequal replica."),
    "check": ("judging", "Say what is wrong with a training, rule by rule."),
    "layouts": ("showing", "Say how values lie over ranks, and how that is known."),
    "stats": ("showing", "Show statistics over steps, ranks and modules."),
    "diff": ("comparing", "Compare two runs value by value, whatever their layouts."),
    "align": ("comparing", "Name the module and token at which trainer and engine part."),
    "report": ("pages", "Draw a run as one HTML file: the loss, maps, lines, ranks."),
    "export": ("exporting", "Write statistics as Parquet, tensors as npz or safetensors."),
    "prove": ("proving", "Show that a program trains with the recorder as without."),
    "replay": ("proving", "Run a recorded call of a module again, alone."),
    "set": ("telling", "Change what a run records while it is under way."),
    "dump": ("telling", "Have a run write what its memory holds of the last steps."),
    "top": ("showing", "Watch a run while it records, one line a rank."),
    "view": ("pages", "Watch runs in a browser while they record."),
    "verify": ("mending", "Check every byte of a run."),
    "repair": ("mending", "Seal what killed processes left open."),
    "merge": ("mending", "Write the global view of a run as a run."),
    "checkpoint": ("exporting", "Write one step's parameters or gradients as torch loads them."),
    "sql": ("exporting", "Ask all runs of a folder, or of a catalog, in SQL."),
    "catalog": ("exporting", "Register runs in an Iceberg catalog, as tables."),
    "daemon": ("daemon", "Ship the runs of this node to a store while they grow."),
    "config": ("starting", "Print the settings in force, and where each comes from."),
    "init": ("starting", "Write a TOML file of all settings, each with its default."),
    "doctor": ("judging", "Say why something was not, or will not be, recorded."),
    "help": ("starting", "Show what a command does, with its options."),
    "run": ("starting", "Run a training command with recording on."),
}
"""The file and the first line of the help of each command, by its name, in the order of ``recorder --help``."""
