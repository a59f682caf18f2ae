"""The training engine: build a Job's model, optimizer and LR scheduler, and run them on DeepSpeed.

Input: a `Job` (dslpar.layout) and the process groups (dslpar.distributed). Output: an `Engine` that takes training
steps, evaluates, and gives its state to checkpoints. Its interface is the same with and without a pipeline.
"""
