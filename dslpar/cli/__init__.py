"""The commands, a module each: `arguments` adds its flags to a parser, `run` runs it and returns the exit status.

In: a command line. Out: text or JSON on standard output, and an exit status: 0 fine, 1 errors found, 2 wrong usage.
`main` finds the command and prints errors; what commands share of their command lines stands in `arguments`.
"""
