"""Rigs that the tests of several rooms, the campaigns and the benchmarks share. They import no tests."""
