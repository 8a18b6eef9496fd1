"""The node daemon: ships what lies on a node's disk to a store, is watched, and carries commands back.

Must never change a run on the disk but by `recorder repair`, in a process of its own, and never remove a file that
the store has not confirmed. A writer does not know whether a daemon is there.
"""
