"""The linter: every rule over a config, without torch and without running the file.

In: a `Config` (dslpar.language), the world size, the hosts. Out: findings with file, line, column and a fix. `check`
has load, lint and resolve as functions, `engine` runs the rules, `rules` holds them, `registry` lists them with the
pages of findings that only a run can make (dslpar.core.catalog), `report` has the output formats.
"""
