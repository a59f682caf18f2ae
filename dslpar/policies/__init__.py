"""transformers models as they are, cut by a policy that is data: every tensor mode, over stages.

In comes a class of transformers with its config; out comes a `LayeredModel`, whose layers run transformers' own code on
this rank's piece. `dslpar.schema.policy` says what a policy is, `derive` makes one of transformers' plans, `apply` puts
sharded modules in place, `skeleton` runs what stands around the blocks, `attention` opens transformers' doors. Nothing
of transformers is imported before a config names one of its models.
"""
