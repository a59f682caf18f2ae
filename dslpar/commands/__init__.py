"""The commands, a module each: `arguments` adds its flags to a parser, `run` runs it and returns the exit status."""
