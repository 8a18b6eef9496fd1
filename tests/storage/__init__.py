"""Runs in an object store, against a real S3 server on this machine."""
