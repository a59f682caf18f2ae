"""The smallest model family: residual MLPs over tokens; what a new family must bring, and nothing else.

Outside its folder it needs a line in dslpar.schema.families.FAMILIES, and its package's in setup.cfg.
"""
