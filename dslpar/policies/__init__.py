"""Policies: run unchanged transformers models in every tensor mode and over pipeline stages.

The input is a transformers class with its config. The result is a `LayeredModel` whose layers run transformers' own
code on this rank's piece. `dslpar.schema.policy` defines policies, which are data. `derive` makes a policy from
transformers' tensor plan, `apply` puts sharded modules in place, `skeleton` runs the code around the blocks, and
`attention` provides the attention function. transformers is imported only when a config names one of its models.
"""
