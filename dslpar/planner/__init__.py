"""The planner: reports of layouts, forecasts and searches, and lint rules that need them. No torch.

It depends on lint, layout and the forecast. `dslpar.linter.registry` lists its rules under this package's name.
"""
