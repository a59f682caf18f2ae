"""Generate tokens: one per step for every prompt of a batch, until each text has ended.

    new = generate(model, [[5, 2], [7]], Options(max_tokens=20))       # [[...], [...]], the new ids of each

All prompts of a batch are at the same position, as in Meta's Llama. The first step runs as many tokens as the shortest
prompt has. Each later step runs one more position. There, a longer prompt has its own next token, and a prompt that has
ended gets a sampled token. Batches and sequences are padded at the end to the multiples that the tensor mode needs. A
causal model's tokens do not attend to later tokens, so the padding changes no result.

Keys and values are cached (layers/kv_cache.py), so a step runs only the newest token. Models that compute attention
scores in their own code (Bloom, T5), and tensor modes that split the sequence, run the whole prefix at each step.
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
from dslpar.inference.sampling import Sampling, streams_of
from dslpar.layers.kv_cache import KeyValueCache
from dslpar.layout.resolve import Job
from dslpar.layout.transformers_data_types import inputs_of
from dslpar.schema.policy import DECODER_INPUTS
from dslpar.schema.sections import Model, OtherModel, TokenModel

Ids = list[int]
DECODER_IDS = "decoder_input_ids"
DEFAULT_TOKENS = 100
DEFAULT_BATCH = 16


class Options(NamedTuple):
    """Options of a generation."""

    max_tokens: int | None = None
    """Maximum number of new tokens per prompt; None: 100, or fewer if the model has no more positions."""
    sampling: Sampling = Sampling()
    end: int | None = None
    """Id that ends a text; it is returned as the text's last id."""
    is_stopped: Callable[[Ids, Ids], bool] = lambda prompt, new: False
    """Whether a text has ended, given the ids of its prompt and its new ids."""
    batch: int = DEFAULT_BATCH
    """Maximum number of prompts in a batch."""


def check_generates(job: Job) -> None:
    """Refuse a model that does not predict next tokens. Raises: DslparError."""
    model = job.spec.model
    if job.has_program_model:
        return  # known once it is built
    if isinstance(model, Model):
        generates, name = isinstance(model, TokenModel), type(model).__name__
    else:
        name = model.target.rpartition(".")[2]
        inputs = inputs_of(job)
        generates = model.is_of_transformers and (inputs == DECODER_INPUTS or DECODER_IDS in inputs)
        generates = generates and name.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration"))
    if not generates:
        message = f"{name} does not predict next tokens, so it cannot generate text"
        raise_finding(
            "CFG231", message, "use dslpar eval RUN, which measures what it has learned", job.path, "model.type"
        )


def max_length(job: Job) -> int | None:
    """Return the number of positions that the model has for a prompt and its new tokens; None: unlimited."""
    model = job.spec.model
    if job.has_program_model:
        return job.seq_len or None  # it has not learned from longer sequences
    if isinstance(model, TokenModel):
        return model.max_seq_len
    if not isinstance(model, OtherModel) or model.transformers is None or DECODER_IDS in inputs_of(job):
        return None  # T5's positions are relative
    return model.transformers.longest_sequence


def generate(model: InferenceModel, prompts: Sequence[Sequence[int]], options: Options) -> list[Ids]:
    """Return the new ids of each prompt, on all ranks. All ranks must call it together; data ranks share the prompts.

    Raises:
        DslparError: a prompt is empty, too long, or has an id outside the model's vocabulary.
    """
    most = _check_prompts(model, prompts, options)
    data = model.groups.axis("data")
    streams = streams_of(prompts)
    # Prompts of similar length run together: a batch takes a step for each position from the end of its shortest prompt
    # to the end of its longest text.
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    mine = by_length[data.index :: data.size]
    found: dict[int, Ids] = {}
    for begin in range(0, len(mine), options.batch):
        numbers = mine[begin : begin + options.batch]
        samples = [(list(prompts[number]), streams[number]) for number in numbers]
        batch = _Batch(model, samples, options, [most[number] for number in numbers])
        found |= dict(zip(numbers, batch.run(), strict=True))
    everything = {number: new for part in collectives.gather_objects(found, data) for number, new in part.items()}
    return [everything[number] for number in range(len(prompts))]


def _check_prompts(model: InferenceModel, prompts: Sequence[Sequence[int]], options: Options) -> list[int]:
    """Return the maximum number of new tokens of each prompt. Raises: DslparError: lists the invalid prompts."""
    job, multiple, vocab_size = model.job, model.length_multiple, model.vocab_size
    limit = max_length(job)
    room = None if limit is None else limit // multiple * multiple
    findings = []
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            findings.append(finding("BAT217", f"prompt {number} has no tokens", "write some text", job.path))
        if wrong := [id for id in prompt if not 0 <= id < vocab_size]:
            message = (
                f"prompt {number} has the token id {wrong[0]}, outside the model's vocabulary of {vocab_size} tokens"
            )
            hint = "name the tokenizer that it was trained with: --tokenizer FOLDER"
            findings.append(finding("BAT217", message, hint, job.path))
        wanted = len(prompt) + (options.max_tokens or 1)
        if room is not None and wanted > room:
            left = room - len(prompt)
            hint = f"--max-tokens {left}, or a shorter prompt" if left > 0 else f"a prompt of at most {room - 1} tokens"
            message = (
                f"prompt {number} has {len(prompt)} tokens, {wanted} with the new ones, but the model takes {room}"
            )
            findings.append(finding("BAT217", message, hint, job.path))
    if findings:
        raise DslparError(findings)
    if options.max_tokens is not None:
        return [options.max_tokens] * len(prompts)
    return [DEFAULT_TOKENS if room is None else min(DEFAULT_TOKENS, room - len(prompt)) for prompt in prompts]


class _Batch:
    """A batch of prompts, padded, that take their steps together."""

    def __init__(
        self, model: InferenceModel, samples: list[tuple[Ids, int]], options: Options, most: list[int]
    ) -> None:
        """Pad the batch. `samples`: (prompt, random stream); `most`: maximum numbers of new tokens, per prompt."""
        self.model, self.options = model, options
        self.num_prompts, self.multiple = len(samples), model.length_multiple
        padding = -len(samples) % model.batch_multiple
        self.most = most + most[-1:] * padding
        samples = samples + samples[-1:] * padding  # the output of these copies is dropped
        prompts = [list(prompt) for prompt, _ in samples]
        self.streams = [stream for _, stream in samples]
        self.is_encoder_decoder = DECODER_IDS in inputs_of(model.job)
        self.encoded = self._padded(prompts) if self.is_encoder_decoder else None
        """Ids and mask of the encoder's prompts; None: a decoder-only model, which continues its prompt."""
        self.ids = [[_decoder_start(model)] for _ in prompts] if self.is_encoder_decoder else prompts
        self.starts = [len(ids) for ids in self.ids]

    def run(self) -> list[Ids]:
        """Return the new ids of each prompt."""
        cache = KeyValueCache() if self.model.can_cache else None
        position, begin = min(self.starts) - 1, 0
        is_done = [False] * len(self.ids)
        while not all(is_done):
            tokens = self._tokens_after(position, begin, cache)
            position += 1
            for number, token in enumerate(tokens):
                if len(self.ids[number]) == position and not is_done[number]:  # longer prompts have their own token
                    self.ids[number].append(token)
                    new = self._new(number)
                    is_done[number] = token == self.options.end or self.options.is_stopped(self._prompt(number), new)
                    is_done[number] |= len(new) == self.most[number]
            begin = 0 if cache is None else position // self.multiple * self.multiple
        return [self._new(number) for number in range(self.num_prompts)]

    def _new(self, number: int) -> Ids:
        return self.ids[number][self.starts[number] :]

    def _prompt(self, number: int) -> Ids:
        """Return the prompt that the new ids continue; [] for an encoder-decoder model."""
        return [] if self.is_encoder_decoder else self.ids[number][: self.starts[number]]

    def _tokens_after(self, position: int, begin: int, cache: KeyValueCache | None) -> Ids:
        """Run the tokens at positions `begin` to `position`; return the next id of each sample, on all ranks."""
        model = self.model
        ids, _ = self._padded([each[begin : position + 1] for each in self.ids])
        stored = model(ids if self.encoded is None else (*self.encoded, ids), cache, begin)
        chosen = torch.zeros(len(self.ids), dtype=torch.int64, device=model.device)
        if model.is_last_stage:
            stored = stored[0] if isinstance(stored, tuple) else stored
            logits = model.logits_at(stored, position - begin, model.vocab_size)
            drawn = (position + 1 - torch.tensor(self.starts)).clamp(min=0)
            chosen = self.options.sampling.choose(logits, drawn, self.streams).to(model.device)
        return model.from_last_stage(chosen).tolist()

    def _padded(self, prompts: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """Return ids and mask, int64 [batch, sequence], padded on the right to a multiple of `self.multiple`."""
        length = -(-max(map(len, prompts)) // self.multiple) * self.multiple
        ids = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts])
        mask = torch.tensor([[1] * len(prompt) + [0] * (length - len(prompt)) for prompt in prompts])
        return ids, mask


def _decoder_start(model: InferenceModel) -> int:
    """Return the id that begins a decoder's text: the config's start id, or else its padding id, as in training."""
    config: Any = model.family.config  # type: ignore[attr-defined]  # only transformers' models have one
    start = getattr(config, "decoder_start_token_id", None)
    return int(start if start is not None else config.pad_token_id or 0)
