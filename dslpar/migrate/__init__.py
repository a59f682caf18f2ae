"""Conversion of other frameworks' configs to dslpar's, with a report of every key: nothing is dropped silently.

The input is a file of ColossalAI, LiBai, DeepSpeed, GPT-NeoX or Megatron-LM. The output is a dslpar config and a
report. One engine (`convert`) applies the source's table, a file in data/ (`table` describes its grammar). Rows name
conversions, which are functions in the source's module. docs/import.md is generated from the tables.
"""
