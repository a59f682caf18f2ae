"""The smallest model family: residual MLPs over tokens; what a new family must bring, and nothing else.

FAMILIES["ResidualMLP"] = "tests.support.mlp_family"      # the one line outside this folder
"""
