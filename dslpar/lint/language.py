"""Placeholder."""
from dslpar.lint.rule import Rule

RULES: tuple[Rule, ...] = ()
