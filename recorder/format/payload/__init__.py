"""The bytes of a payload: encodings, frames, byte planes, the choice between them, and the fingerprint of values."""
