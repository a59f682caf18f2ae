"""Processes that work together: a rank's place in its job, its process groups, and the collectives that it calls.

In: the environment of a launcher, and a `Mesh`. Out: a `DistributedEnv`, initialized process groups as `Groups` of
`Axis` handles, and collectives in differentiable pairs. Also the one file that mends DeepSpeed, whose functions must
run before what they mend does.
"""
