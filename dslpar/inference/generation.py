"""Generate tokens: the next one of every prompt of a batch, until each has its end.

    new = generate(model, [[5, 2], [7]], Options(max_tokens=20))       # [[...], [...]], the new ids of each

Prompts of different lengths are padded on the right: a causal model's token attends to nothing after it, so padding
changes nothing, in any tensor mode, and no position moves. Batches and sequences are padded to what the mode divides
them by. Each step runs the whole prefix, as nanoGPT's `generate` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.distributed import collectives
from dslpar.inference.model import InferenceModel
from dslpar.inference.sampling import Sampling
from dslpar.layout.resolve import Job
from dslpar.policies.data_types import inputs_of
from dslpar.policies.policy import DECODER_INPUTS
from dslpar.schema.sections import Model, OtherModel, TokenModel

Ids = list[int]
DECODER_IDS = "decoder_input_ids"
DEFAULT_TOKENS = 100
DEFAULT_BATCH = 16


class Options(NamedTuple):
    """What is generated of each prompt."""

    max_tokens: int | None = None
    """The most new tokens; None: 100, or as many as the model has positions for."""
    sampling: Sampling = Sampling()
    end: int | None = None
    """The id that ends a text; it is the last one of what is returned."""
    is_stopped: Callable[[Ids], bool] = lambda new: False
    """Whether a text of these new ids is at its end."""
    batch: int = DEFAULT_BATCH
    """Prompts that are run together."""


def check_generates(job: Job) -> None:
    """Refuse a model that predicts no next token. Raises DslparError."""
    model = job.spec.model
    if isinstance(model, Model):
        generates, name = isinstance(model, TokenModel), type(model).__name__
    else:
        name = model.target.rpartition(".")[2]
        inputs = inputs_of(job)
        generates = model.is_of_transformers and (inputs == DECODER_INPUTS or DECODER_IDS in inputs)
        generates = generates and name.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration"))
    if not generates:
        message = f"{name} predicts no next token: nothing can be generated with it"
        raise_finding("CFG231", message, "dslpar eval RUN, which measures what it has learned", job.path, "model.type")


def max_length(job: Job) -> int | None:
    """Return how many positions the model has for a prompt and what follows; None: as many as one likes."""
    model = job.spec.model
    if isinstance(model, TokenModel):
        return model.max_seq_len
    if not isinstance(model, OtherModel) or model.transformers is None or DECODER_IDS in inputs_of(job):
        return None  # T5's positions are relative
    return model.transformers.longest_sequence


def generate(model: InferenceModel, prompts: Sequence[Sequence[int]], options: Options) -> list[Ids]:
    """Return the new ids of each prompt, on all ranks. All ranks together; data ranks each take a share.

    Raises:
        DslparError: a prompt is empty or too long, or has an id that the model does not know.
    """
    max_tokens = _check_prompts(model, prompts, options)
    data = model.groups.axis("data")
    mine = list(range(data.index, len(prompts), data.size))
    found: dict[int, Ids] = {}
    for begin in range(0, len(mine), options.batch):
        numbers = mine[begin : begin + options.batch]
        batch = _Batch(model, [list(prompts[number]) for number in numbers], options, max_tokens)
        found |= dict(zip(numbers, batch.run(), strict=True))
    everything = {number: new for part in collectives.gather_objects(found, data) for number, new in part.items()}
    return [everything[number] for number in range(len(prompts))]


def _check_prompts(model: InferenceModel, prompts: Sequence[Sequence[int]], options: Options) -> int:
    """Return the most new tokens. Raises DslparError, with every prompt that cannot be used."""
    job, multiple, vocab_size = model.job, model.length_multiple, vocab_size_of(model)
    limit = max_length(job)
    room = None if limit is None else limit // multiple * multiple
    findings = []
    longest = max(map(len, prompts), default=0)
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            findings.append(finding("BAT217", f"prompt {number} has no tokens", "write some text", job.path))
        if wrong := [id for id in prompt if not 0 <= id < vocab_size]:
            message = f"prompt {number} has the id {wrong[0]}, and the model knows {vocab_size} tokens"
            hint = "name the tokenizer that it was trained with: --tokenizer FOLDER"
            findings.append(finding("BAT217", message, hint, job.path))
        wanted = len(prompt) + (options.max_tokens or 1)
        if room is not None and wanted > room:
            left = room - len(prompt)
            hint = f"--max-tokens {left}, or a shorter prompt" if left > 0 else f"a prompt of at most {room - 1} tokens"
            message = (
                f"prompt {number} has {len(prompt)} tokens, and with what follows {wanted}; the model takes {room}"
            )
            findings.append(finding("BAT217", message, hint, job.path))
    if findings:
        raise DslparError(findings)
    if options.max_tokens is not None:
        return options.max_tokens
    return DEFAULT_TOKENS if room is None else min(DEFAULT_TOKENS, room - longest)


def vocab_size_of(model: InferenceModel) -> int:
    """Return the ids that the model knows."""
    size: int = model.family.vocab_size  # type: ignore[attr-defined]  # of GPT and of transformers' models
    return size


class _Batch:
    """Prompts that are run together."""

    def __init__(self, model: InferenceModel, prompts: list[Ids], options: Options, max_tokens: int) -> None:
        self.model, self.options, self.max_tokens = model, options, max_tokens
        self.num_prompts = len(prompts)
        padding = -len(prompts) % model.batch_multiple
        prompts = prompts + prompts[-1:] * padding  # what is made of a copy is dropped
        self.is_encoder_decoder = DECODER_IDS in inputs_of(model.job)
        self.encoded = self._padded(prompts) if self.is_encoder_decoder else None
        """Ids and mask of the encoder's prompts; None: of a decoder alone, which goes on with its prompt."""
        self.ids = [[_decoder_start(model)] for _ in prompts] if self.is_encoder_decoder else prompts
        self.starts = [len(ids) for ids in self.ids]

    def run(self) -> list[Ids]:
        """Return the new ids of each prompt."""
        done = [False] * len(self.ids)
        steps = 0
        while not all(done) and steps < self.max_tokens:
            for number, token in enumerate(self._next_tokens().tolist()):
                if not done[number]:
                    self.ids[number].append(token)
                    new = self._new(number)
                    done[number] = token == self.options.end or self.options.is_stopped(new)
            steps += 1
        return [self._new(number) for number in range(self.num_prompts)]

    def _new(self, number: int) -> Ids:
        return self.ids[number][self.starts[number] :]

    def _next_tokens(self) -> Tensor:
        """Return the next id of each sample [batch], on all ranks."""
        model = self.model
        lengths = torch.tensor([len(ids) for ids in self.ids])
        stored = model(self._inputs())
        chosen = torch.zeros(len(self.ids), dtype=torch.int64, device=model.device)
        if model.is_last_stage:
            stored = stored[0] if isinstance(stored, tuple) else stored
            logits = model.logits_at(stored, lengths - 1, vocab_size_of(model))
            drawn = lengths - torch.tensor(self.starts)
            chosen = self.options.sampling.choose(logits, drawn).to(model.device)
        return model.from_last_stage(chosen).cpu()

    def _inputs(self) -> Tensor | tuple[Tensor, ...]:
        ids, _ = self._padded(self.ids)
        return ids if self.encoded is None else (*self.encoded, ids)

    def _padded(self, prompts: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """Return ids and mask, int64 [batch, sequence], padded on the right to what the layout divides sequences by."""
        multiple = self.model.length_multiple
        length = -(-max(map(len, prompts)) // multiple) * multiple
        ids = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts])
        mask = torch.tensor([[1] * len(prompt) + [0] * (length - len(prompt)) for prompt in prompts])
        return ids, mask


def _decoder_start(model: InferenceModel) -> int:
    """Return the id that begins a decoder's text: the model's own, or its padding's, as in training."""
    config: Any = model.family.config  # type: ignore[attr-defined]  # of transformers' models alone
    start = getattr(config, "decoder_start_token_id", None)
    return int(start if start is not None else config.pad_token_id or 0)
