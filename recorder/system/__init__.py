"""The package's dealings with the operating system: processes, descriptors, memory, the log, executors."""
