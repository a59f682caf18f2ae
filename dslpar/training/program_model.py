"""Build a program's model from its import path, for commands that use a run whose model a program passed.

    build = builder("own_model.language_model")        # a class, a function, or a model that the module has built
    model = build(config, job, groups)

The module is imported, so a program must start its training below `if __name__ == "__main__"`. A class or function gets
the arguments that it names: `run` is a `dslpar.Run`, `groups` its process groups. uvicorn and gunicorn also take an
application by its import path, or a function that makes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import COMMAND_LINE, Location
from dslpar.distributed.groups import Groups
from dslpar.engine.model import as_layered_model
from dslpar.language.lazy import locate
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.models.layered import LayeredModel
from dslpar.training.started_run import Run

Build = Callable[[Config, Job, Groups], LayeredModel]
"""Function that builds a program's model on this rank."""

_HINT = "name a function that returns the model, and whose parameters are none, `run` or `groups`"


def builder(name: str) -> Build:
    """Return the function that builds the model called `name`, "module.attribute" or "module:attribute".

    The function raises DslparError if there is no such object, or if it makes no model.
    """

    def build(config: Config, job: Job, groups: Groups) -> LayeredModel:
        found = locate(name.replace(":", "."), Location(COMMAND_LINE))
        if not isinstance(found, nn.Module | LayeredModel):
            if not callable(found):
                _refuse(f"{name} has the type {type(found).__name__}, and is no model")
            found = found(**_arguments(found, name, Run(config, job, groups)))
        if not isinstance(found, nn.Module | LayeredModel):
            _refuse(f"{name} returned a value of type {type(found).__name__}, and no model")
        return as_layered_model(found, job.path)

    return build


def _arguments(function: Callable[..., Any], name: str, run: Run) -> dict[str, object]:
    """Return the arguments that a function names, of those that dslpar can give."""
    known = {"run": run, "groups": run.groups}
    parameters = inspect.signature(function).parameters.values()
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in positional]
    if unknown := [each for each in required if each not in known]:
        _refuse(f"{name} needs the argument {unknown[0]!r}")
    return {each: known[each] for each in required}


def _refuse(message: str) -> NoReturn:
    raise_finding("CFG233", message, _HINT, COMMAND_LINE, "model")
