"""Promise 1 as a table: the layout never changes the maths. `python -m tests.properties.invariance` runs and prints
all of it.
"""
