"""Mutation tests of the maths: the mistakes that tests and `dslpar prove` detect. The command is `__main__`."""
