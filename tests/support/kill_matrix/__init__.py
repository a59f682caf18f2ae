"""Which mistakes in the maths do the tests see, and which does `dslpar prove`? The command is `__main__`."""
