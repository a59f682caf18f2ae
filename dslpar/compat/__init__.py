"""Interfaces of other frameworks over dslpar's own API, for programs that are ported.

In: calls as ColossalAI's users write them. Out: the same steps, taken by `dslpar.engine`. Config files are no matter of
this package: `dslpar.migrate` converts them, and `dslpar.schema` reads LiBai's `train.dist` as it is.
"""
