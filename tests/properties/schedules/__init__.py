"""Every pipeline schedule against 1F1B: `python -m tests.properties.schedules` prints each row's deviation.

The layouts, models and samples are those of `invariance`, which compares 1F1B with one process in double precision.
"""
