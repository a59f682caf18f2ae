"""Configs of other frameworks, converted to dslpar's, with a report of every key: nothing is dropped in silence.

In: a file of ColossalAI's, LiBai's or DeepSpeed's. Out: a dslpar config and a report. One engine (`convert`) runs the
table of the source, a file below data/ (`table` has its grammar); rows name conversions, which are functions of the
module of that source. docs/import.md is generated from the tables.
"""
