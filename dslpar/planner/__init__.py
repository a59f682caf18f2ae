"""The planner: reports of layouts, forecasts and searches, and lint rules that need forecasts.

It does not import torch. It depends on the linter, the layout and the forecast. `dslpar.linter.registry` imports the
rules by name, because this package imports the linter itself.
"""
