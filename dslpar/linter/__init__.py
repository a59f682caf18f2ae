"""The linter: applies every rule to a config, without torch and without running the file.

Input: a `Config` (dslpar.language), the world size, the hosts. Output: findings with file, line, column and a fix.
`check` has the functions load, lint and resolve. `engine` runs the rules, which are in `rules`. `registry` lists the
rules, and the pages of findings that only a run can make (dslpar.core.catalog). `report` has the output formats.
"""
