"""The rules of the linter, a file for each family; the tuple RULES at its end goes to `dslpar.linter.registry`.

In: a `Context` (the config, its typed sections, the world, the hosts). Out: problems, each with its location. A
rule's page is its docstring and `pages/CODE.md`; both of its examples are tested.
"""
