"""The rules of the linter, one file per family; `dslpar.linter.registry` collects the tuple RULES at the end of each.

A rule takes a `Context` (the config, its typed sections, the world size, the hosts), and yields problems, each with its
location. The page of a rule (`dslpar explain CODE`) consists of its docstring and `pages/CODE.md`. Both examples on it
are tested.
"""
