"""Values by their plans: payloads, global rows and their statistics."""
