"""What a row says of its values beyond single numbers: bytes that add up over chunks, ranks and steps."""
