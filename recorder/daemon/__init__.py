"""The node daemon: ships the runs on a node's disk to a store, serves metrics, and carries commands from the store.

The daemon must never change a run on the disk except by `recorder repair`, in a separate process. It must never remove
a file that the store has not confirmed. A writer does not know whether a daemon is running.
"""
