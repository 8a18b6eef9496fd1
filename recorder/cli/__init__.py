"""The command line, which shows people and programs what was read. Only this room prints."""
