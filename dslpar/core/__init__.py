"""Core of dslpar: findings, escaping of text, frozen values, suggestions for misspelt names, and the mesh.

This package imports no other package of dslpar, and not torch. It provides `Finding` and `DslparError`, the catalogue
of findings that a run can raise, `visible` for printed text, helpers for frozen dataclasses, the nearest name to a
misspelt one, and `Mesh`, the arithmetic of ranks and axes.
"""
