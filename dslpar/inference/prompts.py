"""Encode prompts as ids and decode ids to text, with the run's tokenizer or byte by byte."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dslpar.core.catalog import raise_finding
from dslpar.data.tokens import vocabulary
from dslpar.layout.resolve import Job
from dslpar.schema.datasets import (
    Data,
    HuggingFaceData,
    OtherData,
    SpanTextData,
    TokensData,
    absolute_path,
    parts_of,
)
from dslpar.schema.token_folders import TOKENIZER, read_token_folder
from dslpar.schema.tokenizer_file import read_tokenizer
from dslpar.schema.vocabularies import BYTES

STDIN = "-"
"""Name of a file that means standard input."""
_CONTEXT = 8
"""Number of last prompt tokens to decode together with new tokens, since they can affect the new tokens' text."""


class Codec(NamedTuple):
    """Tokenizer, or the mapping of bytes to ids, with the id that ends a text."""

    tokenizer: Any
    """`tokenizers.Tokenizer`; None: each byte is a token."""
    first_byte: int = 0
    """Id of byte 0, if bytes are tokens."""
    end: int | None = None
    """Id that ends a text; None: there is no such id."""
    ends_prompt: bool = False
    """Whether prompts end with `end`, as T5's encoder expects."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt."""
        text = text.encode("utf-8", "replace").decode()  # replaces lone surrogates, which JSON may contain
        if self.tokenizer is None:
            ids = [self.first_byte + byte for byte in text.encode()]
        else:
            ids = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return [*ids, self.end] if self.ends_prompt and self.end is not None else ids

    def decode_after(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """Return the text of new ids that follow a prompt. Decoded alone, they may lack the blank before a word."""
        before = list(prompt[-_CONTEXT:])
        known, whole = self.decode(before), self.decode([*before, *new])
        return whole[len(known) :] if before and whole.startswith(known) else self.decode(new)

    def token(self, text: str, default: int | None) -> int | None:
        """Return the id of a text if it is a single token, or else `default`."""
        found = self.tokenizer.token_to_id(text) if self.tokenizer is not None and text else None
        return default if found is None else int(found)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens; invalid UTF-8 is replaced."""
        if self.tokenizer is not None:
            text: str = self.tokenizer.decode(list(ids))
            return text
        found = (id - self.first_byte for id in ids)
        return bytes(byte for byte in found if 0 <= byte < BYTES).decode("utf-8", "replace")


def codec_of(job: Job, tokenizer: str | None = None) -> Codec:
    """Return a run's codec. `tokenizer`: a file or folder to use instead of the run's tokenizer.

    Raises:
        DslparError: the tokenizer cannot be used, or it is unknown which tokenizer made the run's token ids.
    """
    # All parts of a blend have the same vocabulary: the first part that defines one is enough.
    data = next((part for part in parts_of(job.spec.data) if not _is_silent(part)), None)
    if data is None and tokenizer is None:
        message = "the tokenizer that made the ids of the run's data is unknown"
        raise_finding("BAT212", message, "name it: --tokenizer FOLDER", job.path, "data")
    if tokenizer is None and isinstance(data, TokensData):
        tokenizer = _of_token_files(job, absolute_path(job.path, data.path))
    if data is not None:
        job = dataclasses.replace(job, spec=dataclasses.replace(job.spec, data=data))
    found = vocabulary(job)
    tells_spans = isinstance(data, SpanTextData)
    end = found.special.get("eos")
    if tokenizer is not None:
        file = read_tokenizer(tokenizer)
        if file.problem:
            hint = "name a tokenizer.json that Hugging Face's tokenizers wrote, or a folder with one"
            raise_finding("BAT212", f"{file.path!r}: {file.problem}", hint, job.path)
        end = file.special("eos") if end is None else end
    elif found.tokenizer is None:
        return Codec(None, found.first_byte, end, tells_spans)
    else:
        file = found.tokenizer
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(file.path)
    made.no_truncation()
    made.no_padding()
    return Codec(made, end=end, ends_prompt=tells_spans)


def _is_silent(data: Data) -> bool:
    """Return whether the data consist of token ids whose tokenizer the config does not name."""
    return isinstance(data, OtherData) or (isinstance(data, HuggingFaceData) and data.text_column is None)


def _of_token_files(job: Job, path: str) -> str | None:
    """Return the path of the tokenizer stored with token files; None: their tokens are bytes."""
    folder = read_token_folder(path)
    beside = Path(path, TOKENIZER)
    if beside.exists():
        return str(beside)
    if folder.tokenizer_digest or folder.is_megatron or folder.problem:
        message = f"the tokenizer that made the token files {path!r} is unknown"
        raise_finding("BAT212", message, "name it: --tokenizer FOLDER", job.path, "data.path")
    return None


def read_prompts(path: str) -> list[str]:
    """Read prompts from a file: one per line, or the "prompt" of each line of a .jsonl file. "-" is stdin.

    Raises:
        DslparError: the file cannot be read or has no prompts, or a JSON line has no "prompt"; with the line number.
    """
    try:
        text = sys.stdin.read() if path == STDIN else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise_finding("BAT217", f"cannot read {path!r}: {error}", "a text file with one prompt per line", path)
    lines = text.split("\n")  # not `splitlines`: other breaks may be text
    if not path.endswith(".jsonl"):
        found = [line for line in lines if line.strip()]
    else:
        found = [_of_json(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise_finding("BAT217", f"{path!r} holds no prompts", "write one prompt per line", path)
    return found


def _of_json(path: str, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise_finding("BAT217", f'line {number} of {path!r} has no "prompt"', '{"prompt": "..."}', path)
    return prompt
