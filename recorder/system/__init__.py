"""Access to the operating system: processes, descriptors, memory, the log, executors."""
