"""Dry runs: one step of any rank of a job, without ranks, devices and numbers; all ranks are checked by their classes.

In: a `Job` (dslpar.layout). Out: what the rank holds, sends and saves, and problems: shards that do not tile, stages
that do not chain, ranks that would wait for each other for ever. It stands on the layers and models themselves, on
torch's meta device; DeepSpeed's engine is not built.
"""
