"""The planner: reports of layouts, forecasts and searches, and lint rules that need them. No torch.

It stands above lint, layout and the forecast. Its rules are listed in `dslpar.linter.registry`, by this package's name.
"""
