"""Rules that judge a training by the statistics of its values: pure, incremental, and without files or torch."""
