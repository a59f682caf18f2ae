"""Distributed runtime: a rank's place in its job, process groups, collectives, gradient reduction.

Input: a launcher's environment and a `Mesh`. Output: a `DistributedEnv`, initialized process groups as `Groups` of
`Axis` handles, and collectives in differentiable pairs. The package also has `deepspeed_patches`, the only code that
patches DeepSpeed. A patch must be applied before the code that it patches runs.
"""
