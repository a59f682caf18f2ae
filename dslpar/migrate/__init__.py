"""Configs of other frameworks, converted to dslpar's, with a report of every key: nothing is dropped in silence.

In: a file of ColossalAI's, LiBai's or DeepSpeed's. Out: a dslpar config and a `Report`. One engine (`convert`) runs a
table of rows for each source (`colossalai`, `libai`, `deepspeed`); docs/import.md is generated from the tables.
"""
