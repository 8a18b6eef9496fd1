"""The parts of one tensor that can be recorded: its plain local values, the tensors inside it, its chunk."""
