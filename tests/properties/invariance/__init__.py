"""Promise 1 over ten steps: one layout or more of each optimizer and precision. `python -m tests.properties.invariance`
runs and prints all; what three steps show, in every combination, is tests/properties/layouts.
"""
