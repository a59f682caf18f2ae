"""Compat: other frameworks' Python interfaces over dslpar's own API, for ported programs.

A program written for ColossalAI keeps its calls, and `dslpar.engine` trains the model. Config files are handled
elsewhere: `dslpar.migrate` converts them, and `dslpar.schema` reads LiBai's `train.dist` unchanged.
"""
