"""ColossalAI's builders of pipeline models, for the launched run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dslpar.compat.context import global_context
from dslpar.compat.pipeline_part import PipelinePart
from dslpar.engine import model as build


def build_pipeline_model_from_cfg(
    config: Mapping[str, object], num_chunks: int = 1, partition_method: str | None = None, verbose: bool = False
) -> PipelinePart:
    """Return this rank's part of the model that dict(type=..., ...) describes.

    See `dslpar.build_pipeline_model_from_cfg`.
    """
    model = build.build_pipeline_model_from_cfg(config, num_chunks, partition_method, verbose)
    return PipelinePart(model, global_context.run)


def build_pipeline_model(
    layers: torch.nn.Sequential, num_chunks: int = 1, partition_method: str | None = None, verbose: bool = False
) -> PipelinePart:
    """Return this rank's part of a list of modules that already exist; see `dslpar.build_pipeline_model`."""
    model = build.build_pipeline_model(layers, num_chunks, partition_method, verbose)
    return PipelinePart(model, global_context.run)
