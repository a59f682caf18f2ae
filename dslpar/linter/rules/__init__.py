"""The rules of the linter, one file per family; `dslpar.linter.registry` collects the tuple RULES at the end of each.

In: a `Context` (the config, its typed sections, the world, the hosts). Out: problems, each with its location. A
rule's page consists of its docstring and `pages/CODE.md`; both examples on it are tested.
"""
