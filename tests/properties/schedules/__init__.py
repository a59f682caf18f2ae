"""Every pipeline schedule against 1F1B: `python -m tests.properties.schedules` prints each row's deviation.

The layouts, models and samples are those of `invariance`, which holds 1F1B against one process in double precision.
"""
