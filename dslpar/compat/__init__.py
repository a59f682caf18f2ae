"""Compat: other frameworks' Python interfaces over dslpar's own API, for ported programs.

It accepts ColossalAI's calls, and `dslpar.engine` takes the same steps. Config files are handled elsewhere:
`dslpar.migrate` converts them, and `dslpar.schema` reads LiBai's `train.dist` unchanged.
"""
