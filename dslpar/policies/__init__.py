"""Policies: run unchanged transformers models in every tensor mode and over pipeline stages.

A policy is data (`dslpar.schema.policy`): it names the linears of a model's attention and MLPs that are sharded. The
input is a transformers class with its config. The result is a `LayeredModel` whose layers run transformers' own code on
this rank's shards. transformers is imported only when a config names one of its models.

- `derive` makes a policy from transformers' tensor plan, and `apply` replaces modules by sharded ones.
- `skeleton` finds the code before, between and after the lists of blocks, and `chain` runs it as layers.
- `attention` is the attention function, which transformers' code calls through transformers' registry.

The other modules use the terms of `dslpar.schema.policy`. A *region* is an attention module or an MLP, whose forward
runs on inner activations. *Inward* linears compute its inner features from the residual (Megatron-LM: column-parallel),
and an *outward* linear adds to the residual (row-parallel). docs/architecture.md, "The cuboid", explains the axes d, q,
x, y and z that split tokens and features.
"""
