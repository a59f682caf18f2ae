"""The engine of a job: the model, optimizer and LR scheduler that a Job describes, run by DeepSpeed.

In: a `Job` (dslpar.layout) and the process groups (dslpar.distributed). Out: an `Engine` that takes training steps,
evaluates, and gives its state to checkpoints; the same interface with a pipeline below it and without.
"""
