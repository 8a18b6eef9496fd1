"""Writes runs in other formats: Parquet, npz, safetensors, and checkpoints of torch."""
