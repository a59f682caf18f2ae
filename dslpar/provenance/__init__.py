"""Provenance of values: the reference of all keys, each value of a config with its reason, differences of two configs.

The input is a checked config, with or without a world size. The output is records and text for `dslpar config`,
`dslpar diff` and docs/config.md.
"""
