"""What a layout costs before anything runs: memory, traffic and floating-point operations, as closed forms.

In: a model's sizes and a cuboid of ranks. Out: elements stored, elements sent by collective and axis, operations of a
step. Plain arithmetic; the tests hold it against what real ranks hold and send.
"""
