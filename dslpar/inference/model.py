"""Trained model for inference: this rank's pipeline stage, with a checkpoint's weights, forward only.

    model = InferenceModel(trained, groups, device)
    stored = model(ids)                                # on the last stage, as ranks store it; None on the others
    logits = model.logits_at(stored, position)         # whole, of one position of each sample

Inference needs no DeepSpeed, since it has no optimizer and no pipeline schedule. A stage runs when the previous stage
has sent its output, as in a pipeline with one micro-batch. (As in Megatron-LM's inference, the layers are those of
training. vLLM has its own layers.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.distributed import collectives, point_to_point
from dslpar.distributed.groups import Groups
from dslpar.engine import partition
from dslpar.engine.model import model_from_job
from dslpar.engine.stage_layers import stage_parts
from dslpar.inference.trained import Trained
from dslpar.inference.weights import load_weights
from dslpar.layers.activation_sharding import unshard
from dslpar.layers.kv_cache import KeyValueCache
from dslpar.layers.placement import inner_cuts, piece, residual_cuts
from dslpar.layout.divisors import least_micro_size
from dslpar.layout.resolve import Job
from dslpar.layout.sharding import stored_runs
from dslpar.layout.token_order import place_of
from dslpar.models.layered import LayeredModel, LayeredModule, LayerSpec
from dslpar.schema.policy import DECODER_INPUTS

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class InferenceModel:
    """This rank's pipeline stage of a trained model. All ranks of a data-parallel replica must call it together."""

    def __init__(
        self, trained: Trained, groups: Groups, device: torch.device, build: Callable[..., LayeredModel] | None = None
    ) -> None:
        """Build the stage and load its weights. All ranks must call it together.

        `build`: builds a program's model from the config, the job and the groups; None: the job's config has the model.

        Raises:
            DslparError: the model cannot be built on this layout, or the checkpoint does not hold it.
        """
        self.job, self.groups, self.device = trained.job, groups, device
        self.dtype = _DTYPES[trained.job.spec.precision.dtype]
        made = model_from_job(trained.job) if build is None else build(trained.config, trained.job, groups)
        self.family = made.for_inference()
        job, layers = partition.partition_layers(trained.job, self.family, groups)
        self.module = LayeredModule(_stage_layers(job, layers, groups))
        load_weights(self.module, groups, trained.checkpoint, trained.job.has_program_model)
        if self.dtype != torch.float32:
            self.module.to(self.dtype)
        self.module.to(device).eval()

    @property
    def is_first_stage(self) -> bool:
        """Return whether this rank is in the first pipeline stage, which reads the inputs."""
        return self.groups.coord["pipe"] == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank is in the last pipeline stage, which has the model's output."""
        return self.groups.coord["pipe"] == self.groups.mesh.pipe - 1

    @property
    def batch_multiple(self) -> int:
        """Number by which the number of samples in a forward must be divisible."""
        return least_micro_size(self.groups.tensor)

    @property
    def length_multiple(self) -> int:
        """Number by which the number of tokens in a sequence must be divisible."""
        tensor, coord = self.groups.tensor, self.groups.coord
        return math.lcm(*(piece(tensor, coord, cuts(tensor).sequence)[1] for cuts in (residual_cuts, inner_cuts)))

    @property
    def can_cache(self) -> bool:
        """Return whether the model's attention can read keys and values of earlier tokens from a cache."""
        if self.job.has_program_model:  # its attention need not be that of dslpar.layers
            return False
        is_whole = piece(self.groups.tensor, self.groups.coord, inner_cuts(self.groups.tensor).sequence)[1] == 1
        policy = getattr(self.family, "policy", None)
        return is_whole and (policy is None or (policy.inputs == DECODER_INPUTS and not policy.own_attention))

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids in the vocabulary of a model that predicts tokens. All ranks must first read it together.

        Raises:
            DslparError: a program's model does not return logits of next tokens.
        """
        if self.job.has_program_model:
            return self._num_logits()
        size: int = self.family.vocab_size  # type: ignore[attr-defined]  # of GPT and of transformers' models
        return size

    def _num_logits(self) -> int:
        """Return the number of logits per token of a program's model, which only its output shows."""
        ids = torch.zeros(self.batch_multiple, self.job.seq_len or 1, dtype=torch.int64)
        output = self(ids)
        if self.is_last_stage:
            self.check_logits(output, ids)
        count = torch.tensor(output.shape[-1] if self.is_last_stage else 0, device=self.device)
        return int(self.from_last_stage(count))

    def check_logits(self, output: Any, labels: Any) -> None:
        """Refuse a program's model whose output has no logits for each label. Raises: DslparError."""
        if isinstance(output, Tensor) and output.is_floating_point() and output.shape[:-1] == labels.shape:
            return
        what = f"a tensor {[*output.shape]}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        message = f"the program's model returns {what}, but labels {[*labels.shape]} need logits [..., classes]"
        hint = "let --model name a function that returns a model of logits"
        raise_finding("CFG233", message, hint, self.job.path, "model")

    @torch.no_grad()
    def __call__(self, inputs: Any, cache: KeyValueCache | None = None, begin: int = 0) -> Any:
        """Return this rank's piece of the output on the last stage; None on earlier stages.

        `inputs`: a tensor or a tuple of tensors, full on every rank of the first stage, and not read on other stages.
        With a `cache`, the inputs are the tokens from position `begin` on, and earlier tokens must have been run with
        the same cache.
        """
        with nullcontext() if cache is None else cache.chunk_at(begin):
            return self._run(inputs)

    def _run(self, inputs: Any) -> Any:
        pipe = self.groups.axis("pipe")
        value = (
            self._placed(inputs) if self.is_first_stage else point_to_point.receive(pipe, pipe.index - 1, self.device)
        )
        if not self.is_first_stage:
            value = value[0] if len(value) == 1 else tuple(value)
        output = self.module(value)
        if self.is_last_stage:
            return output
        point_to_point.send(output if isinstance(output, tuple) else (output,), pipe, pipe.index + 1)
        return None

    def _placed(self, value: Any) -> Any:
        """Move inputs to the device, and cast floats to the model's dtype."""
        if isinstance(value, tuple):
            return tuple(map(self._placed, value))
        return value.to(self.device, self.dtype if value.is_floating_point() else None)

    def logits_at(self, stored: Tensor, position: int, vocab_size: int) -> Tensor:
        """Return the full logits [batch, vocab_size] at one position, equal on all tensor ranks.

        `stored` is this rank's piece of the logits, [batch/x, sequence/x, V/n]. Only one row per sample is gathered.
        """
        tensor, coord, cuts = self.groups.tensor, self.groups.coord, inner_cuts(self.groups.tensor)
        length = stored.shape[1] * piece(tensor, coord, cuts.sequence)[1]
        own = place_of(position, stored_runs(tensor, coord, cuts.sequence, length))
        # Of the ranks that share a sequence, one has the position; the others contribute zeros to the all-reduce.
        rows = torch.zeros_like(stored[:, 0]) if own is None else stored[:, own]
        rows = collectives.all_reduce(rows, self.groups.axis(*cuts.sequence))
        return unshard(self.groups, rows, (cuts.batch, cuts.features))[:, :vocab_size]

    def from_last_stage(self, value: Tensor) -> Tensor:
        """Broadcast the last stage's tensor to all stages; each stage passes a tensor of the same shape."""
        pipe = self.groups.axis("pipe")
        return collectives.broadcast(value, pipe, source=pipe.size - 1)


def _stage_layers(job: Job, layers: Sequence[LayerSpec], groups: Groups) -> list[LayerSpec]:
    """Return the layers of this rank's stage.

    If the owner of a tied weight is on another stage, the first layer of this stage that uses the weight owns a copy.
    """
    stage, own = groups.coord["pipe"], list(layers)
    if groups.mesh.pipe > 1:
        assert job.stages.counts is not None, "partition_layers has set them"
        begin, end = stage_parts([layer.layer_idx for layer in layers], job.stages.counts)[stage : stage + 2]
        own = own[begin:end]
    seen: set[str] = set()
    for number, layer in enumerate(own):
        if layer.owner not in seen and layer.tied:
            own[number] = replace(layer, name=layer.owner, tied=None)
        seen.add(layer.owner)
    return own
