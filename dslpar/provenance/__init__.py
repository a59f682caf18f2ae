"""Where values come from: the reference of all keys, each value of a config with its reason, how two configs differ.

In: a checked config, with a world size or without. Out: records and text for `dslpar config`, `dslpar diff` and
docs/config.md.
"""
