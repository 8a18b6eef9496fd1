"""Runs in other formats: Parquet, npz, safetensors, checkpoints of torch."""
