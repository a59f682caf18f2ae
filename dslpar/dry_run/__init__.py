"""Dry runs: one step of any rank of a job, without other ranks, devices or numbers; classes of ranks stand for all.

Input: a `Job` (dslpar.layout). Output: what the rank holds, sends and saves, and problems: shards that do not tile,
stages that do not chain, ranks that would wait for each other forever. A dry run executes the layers and models
themselves on torch's meta device; it does not build DeepSpeed's engine.
"""
