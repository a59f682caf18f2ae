"""The rules of the linter, a file a family of codes; each file ends with a tuple RULES that dslpar.linter.engine runs.

In: a `Context` (the config, what was read of it, the world, the hosts). Out: problems, each at its place. The
docstring of a rule is its page in docs/rules, and both of its examples are tested.
"""
