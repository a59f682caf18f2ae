"""Every schedule of a pipeline against 1F1B: `python -m tests.properties.schedules` prints how far each row is off.

The layouts, models and samples are those of `invariance`, which holds 1F1B against one process in double precision.
"""
