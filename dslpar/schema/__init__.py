"""The config schema: typed sections whose fields carry all facts about their keys, and the reader.

Input: the tree of a config (dslpar.language). Output: a `Spec`, and findings for unknown keys and invalid values.
`fields` declares keys, and `keys` derives tables from the declarations. The names that torch and DeepSpeed accept are
in data/, so that lint does not need torch. Tests compare these names with the installed packages.
"""
