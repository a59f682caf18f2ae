"""The smallest model family: residual MLPs over tokens, with only the parts that a new family must have.

Outside its folder it needs a line in dslpar.schema.families.FAMILIES, and its package in setup.cfg.
"""
