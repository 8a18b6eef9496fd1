"""The files that a writer makes: system calls, syncs, IPC files with checked batches, manifests and status."""
