"""Runs for the pages of others: TensorBoard, and Weights & Biases."""
