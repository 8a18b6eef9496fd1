"""The hooks on a model's modules, and what the hooks do when they fire. A hook holds only a number."""
