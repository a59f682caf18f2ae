"""BAT112 to BAT119: check that `data` suits the model, and that tokenizers and data files can be used."""

from __future__ import annotations

import os
from collections.abc import Iterator

from dslpar.layout.resolve import seq_len_of
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule
from dslpar.schema.datasets import (
    ChatData,
    Data,
    ImageData,
    MaskedTextData,
    SpanTextData,
    TokensData,
    absolute_path,
    parts_by_key,
    type_name,
)
from dslpar.schema.sections import ImageModel, Model


@rule("BAT112", "tokenizer-not-usable")
def tokenizer_not_usable(cx: Context) -> Iterator[Problem]:
    """A tokenizer.json cannot be read, or lacks a special token that the type of data needs."""
    for key, data in parts_by_key(cx.spec.data):
        if data.tokenizer is not None:
            yield from _check_tokenizer(cx, key, data, data.tokenizer)


def _check_tokenizer(cx: Context, key: str, data: Data, tokenizer: str) -> Iterator[Problem]:
    from dslpar.schema.vocabularies import vocabulary_of  # most configs have none

    found = vocabulary_of(data, cx.config.path, cx.spec.model, seq_len_of(cx.spec))
    file = found.tokenizer
    hint = "leave tokenizer out; or choose a tokenizer.json that Hugging Face's tokenizers wrote"
    if file is None or (file.missing and not os.path.isdir(absolute_path(cx.config.path, tokenizer))):
        return  # BAT111 reports a missing file: it may be on the job's hosts
    if file.problem:
        yield cx.problem(f"{key}.tokenizer", f"cannot use {file.path!r}: {file.problem}", hint)
    elif found.missing:
        message = f"type {type_name(data)!r} needs a token {found.missing!r}, which the tokenizer does not have"
        yield cx.problem(f"{key}.tokenizer", message, f"{hint} with that token")


@rule("BAT113", "data-of-another-model")
def data_of_another_model(cx: Context) -> Iterator[Problem]:
    """The type of `data` is not one that the model's class learns from."""
    if not cx.source.given("data") and cx.config.root.get("data") is None:
        return  # a program may bring the data; train.py reports it (BAT211)
    if type_name(cx.spec.data) == "text" and not _says_text(cx):
        return
    from dslpar.layout import transformers_data_types as data_types  # most configs name no data

    for key, data in parts_by_key(cx.spec.data):
        if (found := data_types.mismatch(cx.spec.model, data)) is not None:
            message, hint = found
            hint = hint.replace("data=", "", 1) if key != "data" else hint
            yield Problem(cx.config.at(key), message, hint, key)
        elif isinstance(data, MaskedTextData) and data.next_sentence is not None:
            name = getattr(cx.spec.model, "target", "").rpartition(".")[2]
            takes = name.endswith("ForPreTraining")
            if name and data.next_sentence != takes:
                predicts = "predicts" if takes else "does not predict"
                message = f"{name} {predicts} whether a second piece of text follows the first"
                yield cx.problem(f"{key}.next_sentence", message, f"next_sentence={takes}, or leave it out")


def _says_text(cx: Context) -> bool:
    """Return whether `data` has keys besides seq_len and eval_fraction, and so describes text.

    A config may have these two keys for the data that a program passes.
    """
    section = cx.config.root.get("data")
    given = set(section.value) if section is not None and section.is_mapping else set()
    return bool(given - {"seq_len", "eval_fraction"})


@rule("BAT114", "sample-too-short")
def sample_too_short(cx: Context) -> Iterator[Problem]:
    """Samples are so short that their special tokens leave no room for text."""
    length = seq_len_of(cx.spec)
    if isinstance(cx.spec.data, MaskedTextData | SpanTextData) and 0 < length < _SHORTEST:
        message = f"samples of {length} tokens, including special ones, have almost no room for text"
        yield cx.problem("data.seq_len", message, f"seq_len={_SHORTEST} or more")


_SHORTEST = 8


@rule("BAT115", "channels-do-not-fit")
def channels_do_not_fit(cx: Context) -> Iterator[Problem]:
    """data.mean or data.std has another number of channels than the model."""
    data, model = cx.spec.data, cx.spec.model
    channels = model.num_channels if isinstance(model, ImageModel) else None
    if channels is None:
        config = cx.model.other.transformers
        channels = config.size("channels") if config is not None else None
    if not isinstance(data, ImageData) or channels is None:
        return
    for key, value in (("mean", data.mean), ("std", data.std)):
        if isinstance(value, list | tuple) and len(value) not in (1, channels):
            message = f"{key} has {len(value)} numbers, but the model's images have {channels} channels"
            yield cx.problem(f"data.{key}", message, f"{key}={value[0]}")


@rule("BAT117", "token-files-not-usable")
def token_files_not_usable(cx: Context) -> Iterator[Problem]:
    """Token files cannot be read, were made by different tokenizers, or are too small for a step."""
    for key, data in parts_by_key(cx.spec.data):
        if isinstance(data, TokensData):
            yield from _check_token_files(cx, key, data)


def _check_token_files(cx: Context, section: str, data: TokensData) -> Iterator[Problem]:
    from dslpar.schema.token_folders import held_out_start, read_token_folder  # most configs have none

    names = {"path": data.path} | ({} if data.eval_path is None else {"eval_path": data.eval_path})
    found = {key: read_token_folder(absolute_path(cx.config.path, name)) for key, name in names.items()}
    for key, folder in found.items():
        if folder.problem and not folder.missing:  # BAT111 reports missing files: they may be on the job's hosts
            message = f"cannot use {folder.path!r}: {folder.problem}"
            yield cx.problem(
                f"{section}.{key}", message, "leave data out; or choose a folder that `dslpar data verify` calls intact"
            )
    if len({each.tokenizer_digest for each in found.values() if not each.problem and not each.is_megatron}) > 1:
        message = "path and eval_path were made by different tokenizers"
        yield cx.problem(f"{section}.eval_path", message, "leave eval_path out; or choose one of the same tokenizer")
    if data.eval_path is not None and cx.source.given(f"{section}.eval_fraction"):
        message = "eval_fraction has no effect with eval_path, which is the held-out data"
        yield cx.problem(f"{section}.eval_fraction", message, "keep one of eval_fraction and eval_path")
    folder, length = found["path"], seq_len_of(cx.spec)
    if folder.problem or not length:
        return
    try:
        tokens = held_out_start(folder, 0 if data.eval_path is not None else data.eval_fraction)
    except (ValueError, OSError) as error:
        yield cx.problem(
            f"{section}.path",
            f"cannot use {folder.path!r}: {error}",
            "leave data out; or choose token files that are intact",
        )
        return
    samples = max(tokens - 1, 0) // length
    # The share of a part in a step is checked when the run starts.
    needed = cx.layout.batch.global_size if section == "data" else 1
    if samples < needed:
        message = f"a step takes {needed} samples, but {tokens:,} training tokens make {samples}"
        yield cx.problem(f"{section}.path", message, "choose more text, a smaller batch, or a shorter data.seq_len")


@rule("BAT118", "conversations-not-usable")
def conversations_not_usable(cx: Context) -> Iterator[Problem]:
    """The first lines of a file are not valid conversations, or there is no chat template."""
    for key, data in parts_by_key(cx.spec.data):
        if isinstance(data, ChatData):
            yield from _check_conversations(cx, key, data)


def _check_conversations(cx: Context, section: str, data: ChatData) -> Iterator[Problem]:
    from dslpar.schema.chat_templates import template_of  # most configs have none
    from dslpar.schema.conversations import HINT, parse, read_lines

    files, eval_path = f"{section}.files", f"{section}.eval_path"
    named = [(files, cx.source.at_item(files, at), name) for at, name in enumerate(data.files)]
    named += [] if data.eval_path is None else [(eval_path, cx.source.at(eval_path), data.eval_path)]
    for key, place, name in named:
        path = absolute_path(cx.config.path, name)
        try:
            for line in read_lines(path, _LOOKED_AT_BYTES) if os.path.isfile(path) else ():
                try:
                    parse(line.text)
                except ValueError as error:
                    yield Problem(place, f"{line.place}: {error}", f"choose another file; {HINT}", cx.source.key(key))
                    break
        except (OSError, EOFError) as error:
            message = f"cannot read {path!r}: {error}"
            yield Problem(place, message, "choose a file that can be read", cx.source.key(key))
    if data.eval_path is not None and cx.source.given(f"{section}.eval_fraction"):
        message = "eval_fraction has no effect with eval_path, which is the held-out data"
        yield cx.problem(f"{section}.eval_fraction", message, "keep one of eval_fraction and eval_path")
    if problem := template_of(data, cx.config.path).problem:
        hint = "template='chatml'; or choose a file with a Jinja template"
        yield cx.problem((f"{section}.template", f"{section}.tokenizer"), problem, hint)


_LOOKED_AT_BYTES = 1 << 16
"""Limit per file, so that lint stays fast; a run reads all lines when it starts."""


@rule("BAT119", "packing-not-exact")
def packing_not_exact(cx: Context) -> Iterator[Problem]:
    """Conversations are packed for a model that does not treat each of them as if it were alone."""
    packed = [key for key, data in parts_by_key(cx.spec.data) if isinstance(data, ChatData) and data.packing]
    if not packed or cx.model.by_program:
        return
    from dslpar.layout import transformers_data_types as data_types

    if isinstance(cx.spec.model, Model) and cx.spec.model.capacity_factor is not None:
        message = "capacity_factor selects among all tokens of a row, so a conversation's loss depends on the others"
        for key in packed:
            yield cx.problem(f"{key}.packing", message, "packing=False; or leave model.experts.capacity_factor out")
        return
    if problem := data_types.packing_problem(cx.spec.model, seq_len_of(cx.spec)):
        for key in packed:
            yield cx.problem(f"{key}.packing", problem, "packing=False")


RULES = (
    *(tokenizer_not_usable, data_of_another_model, sample_too_short, channels_do_not_fit, token_files_not_usable),
    *(conversations_not_usable, packing_not_exact),
)
