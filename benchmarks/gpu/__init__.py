"""Checks that need a GPU: `python -m benchmarks.gpu`, or `make gpu`."""
