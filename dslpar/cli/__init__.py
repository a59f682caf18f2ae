"""Command line: one module per command, with `add_arguments` for its flags and `run`, which returns the exit status.

Commands print text or JSON to stdout. Their exit status is 0 (no errors), 1 (errors found) or 2 (wrong usage). The
module `main` finds the requested command. `arguments` has the flags that several commands share. To add a command, add
a module and a line in `main.COMMANDS`.
"""
