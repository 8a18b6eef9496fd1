"""From `Staged` to shards on disk, on one thread. Must never import torch, nor the reading side."""
