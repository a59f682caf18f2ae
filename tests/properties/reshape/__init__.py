"""Promise 3 as a table: what is saved on one layout goes on in any other. `python -m tests.properties.reshape` runs
all of it.
"""
