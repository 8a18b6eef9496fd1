"""The hooks on the modules of a model, which hold only a number, and the work that they do when they fire."""
