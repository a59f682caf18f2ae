"""Promise 1 over ten steps: at least one layout per optimizer and precision. `python -m tests.properties.invariance`
runs and prints all. tests/properties/layouts covers every combination in three steps.
"""
