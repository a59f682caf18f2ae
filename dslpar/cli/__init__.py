"""The commands, a module each: `add_arguments` adds its flags to a parser, `run` runs it and returns the exit status.

In: a command line. Out: text or JSON on stdout, and an exit status: 0 fine, 1 errors found, 2 wrong usage. `main` finds
the command; `arguments` has the flags that commands share. A new command is a module, and a line of `main.COMMANDS`.
"""
