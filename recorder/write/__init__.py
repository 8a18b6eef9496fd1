"""Writes `Staged` records to shards on disk, on one thread. Must never import torch or the modules that read."""
