"""A job on its ranks: the model, optimizer and schedule that a Job describes, in DeepSpeed's hands.

In: a `Job` (dslpar.layout) and the process groups (dslpar.distributed). Out: an `Engine` that takes training steps,
evaluates, and gives its state to checkpoints; one surface, whether a pipeline runs below it or a plain module.
"""
