"""Forecast a layout before anything runs: memory and step time in closed form, and a search for better layouts.

Input: a model's costs (`dslpar.costs`), a mesh and a machine. Output: bytes per rank, seconds per step, and layouts in
order of their time. The forecast is plain arithmetic. Tests compare it with the memory and traffic of real ranks.

Terms of this package:

- *Workload*: one training step as plain values (`workload`).
- *Framework*: the behaviour of a training framework that changes memory or time, such as the dtype of gradients
  (`workload`).
- *Constants*: fitted numbers that no data sheet has, such as the share of its peak that a device reaches (`constants`).
- *Terms*: the inputs of a time that depend on no constant, such as seconds at a device's peak and bytes over a link
  (`part_terms`, `step_time.Terms`). A search caches them, and a calibration computes them once per run.
- *Binding rank*: the pipeline rank that needs the most memory (`stage_memory`).
"""
