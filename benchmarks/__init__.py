"""Side-by-side measurements: `make bench`, or `python -m benchmarks [lint_speed] [overhead]`. Each prints ratios.

`python -m benchmarks.traffic` counts traffic instead, and prints a table. On a busy machine absolute times mean little,
but the ratios of alternating runs hold: see benchmarks.measure.
"""
