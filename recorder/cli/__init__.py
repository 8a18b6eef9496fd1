"""The command line: what is read, shown to people and programs. Only this room prints."""
