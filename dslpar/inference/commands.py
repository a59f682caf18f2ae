"""Commands `dslpar generate` and `dslpar eval` on each rank; rank 0 prints."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dslpar.core.catalog import raise_finding
from dslpar.core.visible import json_text, visible, visible_lines
from dslpar.data.source import Source, find_source
from dslpar.distributed.groups import Groups
from dslpar.inference.evaluation import Result, all_parts, evaluate, held_out_parts
from dslpar.inference.generation import DECODER_IDS, DEFAULT_BATCH, Ids, Options, check_generates, generate
from dslpar.inference.model import InferenceModel
from dslpar.inference.prompts import STDIN, codec_of, read_prompts
from dslpar.inference.ranks import run_on_ranks
from dslpar.inference.sampling import Sampling
from dslpar.inference.trained import Trained, open_run
from dslpar.layout.transformers_data_types import check_data, inputs_of
from dslpar.models.layered import LayeredModel
from dslpar.reporting import logging
from dslpar.schema.datasets import is_images

Build = Callable[..., LayeredModel]
"""Function that builds a program's model from the config, the job and the groups."""


def run_generate(args: argparse.Namespace, overrides: Sequence[str], build: Build | None = None) -> int:
    """Run `dslpar generate` with its arguments; return the exit status.

    `build`: builds the model that the run's program passed; None: the run's config has the model.
    """

    def open_trained(world_size: int) -> Trained:
        found = _open(args, overrides, world_size)
        check_generates(found.job)
        return found

    return run_on_ranks(open_trained, partial(_generate, args, build), _request(args))


def _request(args: argparse.Namespace) -> str:
    return repr(sorted((name, value) for name, value in vars(args).items() if name != "local_rank"))


def run_eval(args: argparse.Namespace, overrides: Sequence[str], build: Build | None = None) -> int:
    """Run `dslpar eval` with its arguments; return the exit status. `build` as in `run_generate`."""
    sources: list[Source] = []

    def open_trained(world_size: int) -> Trained:
        # Data of another type have other config keys, so the run's data section is removed first.
        anew = ["data=None"] if any(each.startswith("data.type=") for each in args.data) else []
        # All samples of data named on the command line are measured, so none must be held out.
        all_data = [*anew, *args.data, "train.eval_interval=None"] if args.data else []
        found = _open(args, [*all_data, *overrides], world_size)
        check_data(found.job)
        if not args.data:
            _check_held_out(found)
        sources.append(find_source(found.job))
        return found

    return run_on_ranks(open_trained, partial(_eval, args, sources, build), _request(args))


def _check_held_out(trained: Trained) -> None:
    """Refuse to measure the config's data if the run's program passed others."""
    if not trained.checkpoint.manifest["fixed"]["data.text"]:
        message = "the run's program passed its data, which its config does not have"
        hint = "name data to measure: --data \"data.files=['test.txt']\", or any other keys of data"
        raise_finding("BAT211", message, hint, trained.checkpoint.path, "data")


def _eval(
    args: argparse.Namespace,
    sources: Sequence[Source],
    build: Build | None,
    trained: Trained,
    groups: Groups,
    device: torch.device,
) -> None:
    (source,) = sources
    with logging.prints_to_log(None):
        model = InferenceModel(trained, groups, device, build)
        parts = all_parts(source) if args.data else held_out_parts(source)
        result = evaluate(model, parts, args.metrics, args.samples)
    if groups.rank == 0:
        _print_result(args.format, trained, result)


def _print_result(format: str, trained: Trained, result: Result) -> None:
    unit = "images" if is_images(trained.job.spec.data) else "tokens"
    about = {"checkpoint": trained.checkpoint.path, "step": trained.checkpoint.step, "samples": result.samples}
    about |= {unit: result.labels} if result.labels else {}
    if format == "json":
        classes = {"classes": result.classes} if result.classes else {}
        finite = {name: value if math.isfinite(value) else None for name, value in result.values.items()}
        sys.stdout.write(json_text({**finite, **about, **classes}))
        return
    of = f", {result.labels:,} {unit}" if unit == "tokens" and result.labels else ""
    lines = [f"{trained.checkpoint.path}: {result.samples:,} samples{of}"]
    lines += [f"{name:12} {value:.4f}" for name, value in result.values.items()]
    sys.stdout.write("".join(visible(line) + "\n" for line in lines))


def _open(args: argparse.Namespace, overrides: Sequence[str], world_size: int) -> Trained:
    options = {"name": args.checkpoint, "config": args.config, "trusted": args.trust}
    return open_run(args.path, world_size, overrides, program_model=args.model is not None, **options)


def _generate(
    args: argparse.Namespace, build: Build | None, trained: Trained, groups: Groups, device: torch.device
) -> None:
    codec = codec_of(trained.job, args.tokenizer)
    if args.prompts == STDIN and trained.job.mesh.world_size > 1:
        raise_finding("BAT217", "prompts on stdin do not reach every rank", "name a file with --prompts FILE")
    prompts = [*args.prompt, *(read_prompts(args.prompts) if args.prompts else ())]
    texts, stop, end = prompts, list(args.stop), codec.end
    if args.chat:
        from dslpar.inference.chat_prompts import chat_prompts_of  # needs transformers, for its Jinja environment

        asked = chat_prompts_of(trained.job, args.tokenizer)
        texts = [asked.write(prompt) for prompt in prompts]
        # If the end of an answer is one token, generation stops at its id: decoding drops special tokens from the text.
        end = codec.token(asked.answer_ends, end)
        stop += [asked.answer_ends] if asked.answer_ends else []
    options = Options(
        max_tokens=args.max_tokens,
        sampling=Sampling(args.temperature, args.top_k, args.top_p, args.seed),
        end=end,
        is_stopped=lambda prompt, new: bool(stop) and _stop_at(codec.decode_after(prompt, new), stop) is not None,
        batch=trained.job.spec.batch.micro_size or DEFAULT_BATCH,
    )
    with logging.prints_to_log(None):
        model = InferenceModel(trained, groups, device, build)
        ids = [codec.encode(text) for text in texts]
        made = generate(model, ids, options)
    if groups.rank == 0:
        before = [[]] * len(ids) if DECODER_IDS in inputs_of(trained.job) else ids
        found = [codec.decode_after(*each) for each in zip(before, made, strict=True)]
        # In a conversation only the answer is shown: the text before it is the template's.
        shown = [""] * len(texts) if args.chat else texts
        _print(args.format, shown, [_until_stop(text, stop) for text in found], made)


def _print(format: str, prompts: Sequence[str], texts: Sequence[str], made: Sequence[Ids]) -> None:
    if format == "json":
        sys.stdout.write(json_text([{"text": text, "tokens": new} for text, new in zip(texts, made, strict=True)]))
        return
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        sys.stdout.write("\n" * (number > 0) + visible_lines(prompt + text) + "\n")


def _stop_at(text: str, stop: Sequence[str]) -> int | None:
    """Return the index at which the first of the `stop` strings begins in a text; None: none occurs."""
    return min((at for each in stop if (at := text.find(each)) >= 0), default=None)


def _until_stop(text: str, stop: Sequence[str]) -> str:
    return text[: _stop_at(text, stop)]
