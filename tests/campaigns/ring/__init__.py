"""The ring at length: the steps around a fault, kills and sick disks in the middle of a dump, memory."""
