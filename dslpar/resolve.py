"""Moved to dslpar.job (a name of its own, since `dslpar.resolve` is a function); for imports in flight."""

from dslpar.job import *  # noqa: F403
from dslpar.job import Batch, Job, Stages, resolve  # noqa: F401
