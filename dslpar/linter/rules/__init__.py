"""The rules of the linter, a file for each family; the tuple RULES at its end goes to `dslpar.linter.registry`.

In: a `Context` (the config, its typed sections, the world, the hosts). Out: problems, each with its location. The
docstring of a rule is its page in docs/rules, and both of its examples are tested.
"""
