"""Lint rules that compare a layout with others, or with a device's memory: PERF and FIT."""

from dslpar.planner.rules import context_parallel, fit, performance, shapes

LEGAL_BUT_SLOW = (*performance.RULES, *shapes.RULES)
FORECAST = (*context_parallel.RULES, *fit.RULES)
"""Rules that forecast legal layouts. They run after all rules that check whether a layout is legal."""
