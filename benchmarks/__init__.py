"""Side-by-side measurements: `make bench`, or `python -m benchmarks [lint_speed] [overhead]`. Each prints ratios.

`python -m benchmarks.traffic` counts what is sent instead, and prints a table. Times of a busy machine mean little,
ratios of what ran in turns hold: see benchmarks.measure.
"""
