"""Surfaces of other frameworks over dslpar's own API, for programs that are moved here.

In: calls as ColossalAI's users write them. Out: the same steps, taken by `dslpar.engine`. Their config files need no
module of this package: `dslpar.migrate` converts them, and `dslpar.schema` reads LiBai's `train.dist` as it is.
"""
