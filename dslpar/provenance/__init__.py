"""Provenance of config values: where each value comes from and why.

The input is a checked config, with or without a world size. The package also makes the reference of all keys, and
compares two configs. The output is records and text for `dslpar config`, `dslpar diff` and docs/config.md.
"""
