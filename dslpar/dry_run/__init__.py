"""Dry runs: one step of any rank of a job in one process, on tensors without memory, without other ranks or devices.

Input: a `Job` (dslpar.layout). Output: the parameters that the rank holds, its collectives and messages, the tensors
saved for the backward, and problems of the layout. Problems are shards that do not cover a parameter exactly once, a
stage that rejects the output of the stage before, and ranks that would wait for each other forever. Ranks and stages
that do the same form classes, and one of each class is run.

A dry run executes the layers and models themselves on torch's meta device. It does not build DeepSpeed's engine. In
this package the *form* of a tensor is its dtype and shape. F, B and W are the forward, the backward (of inputs only,
if the schedule splits it), and the backward of weights.
"""
