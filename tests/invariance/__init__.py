"""Promise 1 as a table: the layout never changes the maths. `python -m tests.invariance` runs and prints all of it."""
