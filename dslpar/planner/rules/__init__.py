"""Lint rules about slow layouts (PERF), and about layouts that do not fit a device's memory (FIT)."""

from dslpar.planner.rules import context_parallel, experts, fit, performance, shapes

LEGAL_BUT_SLOW = (*performance.RULES, *shapes.RULES)
FORECAST = (*context_parallel.RULES, *experts.RULES, *fit.RULES)
"""Rules that forecast legal layouts. They run after all rules that check whether a layout is legal."""
