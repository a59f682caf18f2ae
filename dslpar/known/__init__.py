"""Names of torch and DeepSpeed that a config may use, and their arguments: data, so that no torch is needed to lint.

What DeepSpeed reads of its config stands in `deepspeed`, which is generated; the others are written by hand. The tests
hold these tables against the signatures of the torch and the DeepSpeed that are installed.
"""
