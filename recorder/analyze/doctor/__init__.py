"""What should have been recorded against what was: every missing value with its reason."""
