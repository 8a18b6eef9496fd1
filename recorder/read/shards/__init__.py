"""The bytes of one shard as rows: its messages, batches, metadata rows, and a row's values. Knows of no run."""
