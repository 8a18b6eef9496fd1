"""Writes `Staged` records to shards on disk, on one thread. Never imports torch or the modules that read runs."""
