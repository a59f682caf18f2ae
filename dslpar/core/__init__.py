"""What everything else is made of: errors and findings, frozen values, suggestions for misspelt names, the mesh.

In: nothing; this package imports no other of dslpar. Out: `Finding` and `DslparError`, the decorator `@frozen`, the
nearest name to a misspelt one, and `Mesh`, the arithmetic of ranks and axes. Nothing here imports torch.
"""
