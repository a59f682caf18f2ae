"""The config schema: typed sections whose fields carry all facts about their keys, and the reader.

In: the tree of a config (dslpar.language). Out: a `Spec`, or findings for unknown keys and invalid values. `fields`
declares keys, and `keys` derives tables from the declarations. The names that torch and DeepSpeed accept are in data/,
so that lint does not need torch. Tests compare them with the installed packages.
"""
