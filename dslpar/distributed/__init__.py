"""Processes that work together: where a rank stands, its process groups, and the collectives that it calls.

In: the environment of a launcher, and a `Mesh`. Out: `Place`, started process groups as `Groups` of `Axis` handles,
and collectives in pairs with their backward. Also the one file that mends DeepSpeed, which must be in force before
anything of DeepSpeed's runs.
"""
