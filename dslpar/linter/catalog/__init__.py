"""Every page of a finding that only a run can make, by code."""

from __future__ import annotations

from dslpar.linter.catalog import checkpoints, classes, data, faults, hosts, layers, ranks, stages
from dslpar.linter.catalog.page import RunTimePage

_FAMILIES = (checkpoints, classes, data, faults, hosts, layers, ranks, stages)
PAGES: tuple[RunTimePage, ...] = tuple(page for family in _FAMILIES for page in family.PAGES)
