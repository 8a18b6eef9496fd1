"""Rules that judge a training by the statistics of its values, step by step, without files or torch."""
