"""What everything else builds on: findings, text made visible, frozen values, suggestions for misspelt names, the mesh.

In: nothing; this package imports no other of dslpar. Out: `Finding` and `DslparError`, the catalogue of findings that a
run can raise, `visible` for text that leaves, the decorator `@frozen` and a light `NamedTuple`, the nearest name to a
misspelt one, and `Mesh`, the arithmetic of ranks and axes. Nothing here imports torch.
"""
