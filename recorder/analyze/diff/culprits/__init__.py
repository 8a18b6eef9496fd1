"""The modules that caused a difference: searched for in the order of execution, and told with numbers and guesses."""
