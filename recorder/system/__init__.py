"""Access to the operating system: processes, file descriptors, memory, logging, executors."""
