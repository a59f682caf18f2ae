"""Families of transformers' through DeepSpeed, against plain transformers: `python -m tests.properties.families` runs
them, prints how far each is off, and writes the record.
"""
