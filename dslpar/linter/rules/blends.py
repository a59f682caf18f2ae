"""BAT121 to BAT123: blends of data sets, and folders saved by Hugging Face's `datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslpar.layout.resolve import seq_len_of
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule
from dslpar.schema.datasets import (
    BlendData,
    Data,
    HuggingFaceData,
    TokensData,
    absolute_path,
    part_key,
    parts_by_key,
    type_name,
)


@rule("BAT121", "parts-do-not-blend")
def parts_do_not_blend(cx: Context) -> Iterator[Problem]:
    """Parts of a blend are weighted in two ways, or have different sample lengths or vocabularies."""
    data = cx.spec.data
    if not isinstance(data, BlendData):
        return
    weights = [part.weight for part in data.parts]
    keys = [part_key(number) for number in range(len(weights))]
    weighted = [number for number, weight in enumerate(weights) if weight is not None]
    if weighted and len(weighted) < len(weights):
        bare = weights.index(None)
        message = f"part {bare} has no weight, but part {weighted[0]} has {weights[weighted[0]]}"
        yield cx.problem(keys[bare], message, f"add weight=1 to {keys[bare]}, or {_left_out(keys, weighted)}")
    if weighted and data.temperature is not None:
        message = "temperature computes weights from the parts' sizes, but parts have weights"
        yield cx.problem("data.temperature", message, f"leave it out, or {_left_out(keys, weighted)}")
    for key, part in parts_by_key(cx.spec.data):
        if part.seq_len is not None and part.seq_len != seq_len_of(cx.spec):
            message = f"{key} has samples of {part.seq_len} tokens, but those of the blend have {seq_len_of(cx.spec)}"
            yield cx.problem(f"{key}.seq_len", message, f"leave it out, or write data.seq_len={part.seq_len}")
    yield from _check_tokenizers(cx)


def _left_out(keys: Sequence[str], weighted: Sequence[int]) -> str:
    return f"leave {' and '.join(f'{keys[number]}.weight' for number in weighted)} out"


def _check_tokenizers(cx: Context) -> Iterator[Problem]:
    """Yield a problem for the first part whose ids come from another tokenizer than those of the parts before it."""
    first: tuple[str, str, str] | None = None
    for key, data in parts_by_key(cx.spec.data):
        made_by = _tokenizer_of(cx, data)
        if made_by is None:
            continue
        name, digest = made_by
        if first is None:
            first = (name, digest, key)
        elif digest != first[1]:
            where = f"{key}.tokenizer" if data.tokenizer is not None else f"{key}.path"
            other = f"{first[0]}, which has another vocabulary"
            message = f"the ids of {key} come from {name}, but those of {first[2]} from {other}"
            hint = "choose parts made by one tokenizer: `dslpar data tokenize --tokenizer FOLDER` makes them"
            yield cx.problem((where, key), message, hint)
            return


def _tokenizer_of(cx: Context, data: Data) -> tuple[str, str] | None:
    """Return a name for the tokenizer of a part, and its digest; None if there are no ids or the tokenizer is unknown.

    Bytes count as a tokenizer: their digest is "", or the id of byte 0 if that is above 0.
    """
    from dslpar.schema.token_folders import read_token_folder
    from dslpar.schema.vocabularies import vocabulary_of

    if isinstance(data, TokensData):
        folder = read_token_folder(absolute_path(cx.config.path, data.path))
        if folder.problem or folder.is_megatron:
            return None
        named = f"tokenizer {folder.tokenizer_digest[:8]} ({data.path!r})" if folder.tokenizer_digest else "bytes"
        return named, folder.tokenizer_digest
    found = vocabulary_of(data, cx.config.path, cx.spec.model, seq_len_of(cx.spec))
    if not found.size or (found.tokenizer is not None and found.tokenizer.problem):
        return None
    if found.tokenizer is None:
        return (f"bytes from {found.first_byte} on", str(found.first_byte)) if found.first_byte else ("bytes", "")
    return f"tokenizer {found.tokenizer.digest[:8]} ({data.tokenizer!r})", found.tokenizer.digest


@rule("BAT122", "blend-weights", "warning")
def blend_weights(cx: Context) -> Iterator[Problem]:
    """The weights of a blend look like shares but do not sum up to 1, or the blend has a single part."""
    data = cx.spec.data
    if not isinstance(data, BlendData):
        return
    if len(data.parts) == 1:
        kind = type_name(data.parts[0].dataset)
        yield cx.problem("data.parts", "the blend has only one part", f"data=dict(type={kind!r}, ...)")
        return
    weights = [part.weight for part in data.parts if part.weight is not None]
    total = sum(weights)
    if len(weights) == len(data.parts) and max(weights) < 1 and abs(total - 1) > _ROUNDING:
        shares = [f"{part_key(number)}.weight={weight / total:.3g}" for number, weight in enumerate(weights)]
        message = f"weights sum up to {total:.3g}, and are divided by their sum"
        yield cx.problem("data.parts", message, f"write {' and '.join(shares)}")


_ROUNDING = 0.015
"""Tolerance for the sum of shares that are written with two decimal places."""


@rule("BAT123", "data-set-not-usable")
def data_set_not_usable(cx: Context) -> Iterator[Problem]:
    """A folder saved by Hugging Face's `datasets` cannot be read, or lacks the split or the column."""
    for key, data in parts_by_key(cx.spec.data):
        if isinstance(data, HuggingFaceData):
            yield from _check_data_set(cx, key, data)


def _check_data_set(cx: Context, key: str, data: HuggingFaceData) -> Iterator[Problem]:
    from dslpar.schema.arrow_folders import read_arrow_folder  # most configs have none

    if data.tokenizer is not None and data.text_column is None:
        message = "there is a tokenizer, but no text_column for it"
        yield cx.problem(f"{key}.tokenizer", message, "add text_column, or leave tokenizer out")
    if data.eval_split is not None and cx.source.given(f"{key}.eval_fraction"):
        message = "eval_fraction has no effect with eval_split, which is the held-out data"
        yield cx.problem(f"{key}.eval_fraction", message, "keep one of eval_fraction and eval_split")
    path = absolute_path(cx.config.path, data.path)
    splits = {"split": data.split} | ({} if data.eval_split is None else {"eval_split": data.eval_split})
    found = {name: read_arrow_folder(path, split) for name, split in splits.items()}
    for name, folder in found.items():
        if folder.problem and not folder.missing:  # BAT111 reports missing folders: they may be on the job's hosts
            hint = f"choose {' or '.join(map(repr, folder.splits))}" if folder.splits else "leave it out"
            hint = hint if folder.is_split else "leave data out; or choose a folder that datasets' save_to_disk wrote"
            where = (f"{key}.{name}", f"{key}.path") if folder.is_split else f"{key}.path"
            yield cx.problem(where, f"cannot use {path!r}: {folder.problem}", hint)
            return
    column, columns = data.text_column, found["split"].columns
    if column is not None and columns and columns.get(column) not in ("string", "large_string"):
        problem = f"its type is {columns[column]}" if column in columns else "there is no such column"
        texts = [name for name, kind in columns.items() if kind in ("string", "large_string")]
        hint = f"choose {' or '.join(map(repr, texts))}" if texts else "leave it out: there is no column of text"
        yield cx.problem(f"{key}.text_column", f"{column!r} is not a text column: {problem}", hint)


RULES = (parts_do_not_blend, blend_weights, data_set_not_usable)
