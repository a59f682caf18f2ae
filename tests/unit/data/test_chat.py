"""Conversations as samples, by hand: learned tokens, truncation and its report, rows, splits, errors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslpar.core.errors import DslparError
from dslpar.data.source import all_counted, find_source, make_samples
from dslpar.inference.evaluation import all_parts
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections
from dslpar.schema.chat_templates import Template, template_of
from dslpar.schema.conversations import Conversation
from dslpar.schema.datasets import ChatData
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.data.chat import ChatSamples, Tokens
from dslpar.data.chat_template import Renderer, TemplateProblemError

Message = dict[str, Any]
GPT = section.GPT(num_layers=1, hidden_size=8, num_heads=2, vocab_size=400, max_seq_len=64, positions="rotary")
UNMARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = template_of(ChatData(files=("x",)), "cfg.py")
END = "<|im_end|>"


def by_hand(messages: list[Message]) -> tuple[str, str]:
    """Return ChatML, and for each character whether it is learned: "x" or "."."""
    text, learned = "", ""
    for message in messages:
        head, said = f"<|im_start|>{message['role']}\n", message["content"] + END
        text += head + said + "\n"
        learned += "." * len(head) + ("x" if message["role"] == "assistant" else ".") * len(said) + "."
    return text, learned


def messages_of(texts: list[str], system: bool) -> list[Message]:
    roles = [*(["system"] if system else []), *(["user", "assistant"] * len(texts))]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(str.strip)
CONVERSATIONS = st.builds(messages_of, st.lists(TEXT, min_size=3, max_size=7), st.booleans())


@given(CONVERSATIONS)
def test_answers_are_what_the_assistant_says(messages: list[Message]) -> None:
    """Answers are found by marks in the template, or by prefixes if there are none, with the end token and nothing
    after it.
    """
    text, learned = by_hand(messages)
    expected = [at for at, mark in enumerate(learned) if mark == "x"]
    for template in (CHATML, Template(UNMARKED)):
        found = Renderer(template, answers_only=True, special=[END])(Conversation(messages))
        assert found.text == text
        assert [at for begin, end in found.spans for at in range(begin, end)] == expected
    whole = Renderer(CHATML, answers_only=False)(Conversation(messages))
    assert whole == (text, [(0, len(text))])


def test_a_line_break_that_ends_an_answer_is_learned() -> None:
    text = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    plain = Template(text + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    found = Renderer(plain, answers_only=True, special=[END])(Conversation(messages_of(["a", "b", "c", "d"], False)))
    assert [found.text[begin:end] for begin, end in found.spans] == ["b\n", "d\n"]


OTHERWISE = "the template writes message 2, an answer, differently if"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # like Qwen3's, which drops thoughts of earlier turns, and DeepSeek-R1's, whose prompt begins them
        (
            UNMARKED.replace("m['content'] +", "m['content'][:99 if loop.last else 1] +"),
            f"{OTHERWISE} other turns follow",
        ),
        (UNMARKED.replace("assistant\n", "assistant\n<think>"), f"{OTHERWISE} it follows the gen"),
        ("{% for m in messages %}\n{{ m['role'] }", "line 2 of the template"),
    ],
)
def test_templates_that_cannot_be_used(text: str, problem: str) -> None:
    with pytest.raises(TemplateProblemError, match=problem):
        Renderer(Template(text), answers_only=True)(Conversation(messages_of(["a", "bb", "c", "dd"], False)))


def test_a_template_may_refuse_a_conversation() -> None:
    text = "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}" + UNMARKED
    assert Renderer(Template(text), answers_only=True)(Conversation(messages_of(list("abcd"), False))).spans
    with pytest.raises(ValueError, match="the template says: no system"):
        Renderer(Template(text), answers_only=True)(Conversation(messages_of(list("abc"), True)))
    with pytest.raises(ValueError, match="the template says"):  # no text to join
        Renderer(Template(UNMARKED), answers_only=True)(Conversation([{"role": "assistant", "tool_calls": [{}]}]))


# ---- samples ----


def tokens(length: int, learned: list[int], first: int = 0) -> Tokens:
    is_learned = np.zeros(length, np.bool_)
    is_learned[learned] = True
    return Tokens(np.arange(first, first + length, dtype=np.uint16), is_learned)


CUT = st.lists(
    st.integers(2, 14).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), unique=True))),
    max_size=20,
)


@given(CUT, st.booleans())
def test_each_conversation_is_in_one_sample_whole(given_: list[tuple[int, list[int]]], packing: bool) -> None:
    seq_len = 8
    said = [tokens(length, learned, 100 * number) for number, (length, learned) in enumerate(given_, 1)]
    made = ChatSamples(said, seq_len, packing, pad=7)
    expected = []
    for ids, is_learned in said:
        pairs = [(a, b if use else IGNORE_INDEX) for a, b, use in zip(ids, ids[1:], is_learned[1:], strict=False)]
        pairs = pairs[:seq_len]
        if any(label != IGNORE_INDEX for _, label in pairs):
            expected.append(pairs)
    assert made.num_cut == sum(len(each.ids) > seq_len + 1 for each in said)
    assert made.num_without_answer == len(said) - len(expected)
    assert made.num_samples <= len(expected)
    found = []
    for sample in range(made.num_samples):
        inputs, labels = made.batch([sample])
        ids, documents = inputs if packing else (inputs, None)
        assert ids.shape == labels.shape == (1, seq_len)
        if documents is None:
            length = max(at for at in range(seq_len) if labels[0, at] != IGNORE_INDEX or ids[0, at] != 7) + 1
            documents = (torch.arange(seq_len) < length).int()[None]
        assert documents.dtype == torch.int32
        numbers = documents[0].tolist()
        assert numbers == sorted(numbers, key=lambda number: number or 99), "padding is at the end"
        assert ids[documents == 0].eq(7).all()
        assert labels[documents == 0].eq(IGNORE_INDEX).all()
        for number in sorted(set(numbers) - {0}):
            own = documents == number
            found.append(list(zip(ids[own].tolist(), labels[own].tolist(), strict=True)))
    assert sorted(found) == sorted(expected)


def written(folder: Path, count: int = 20, name: str = "chat.jsonl") -> Path:
    lines = [messages_of([f"{n}+1?", str(n + 1)] * (1 + n % 3), n % 4 == 0) for n in range(count)]
    for each in lines:
        if each[-1]["role"] != "assistant":
            each.append({"role": "assistant", "content": "yes"})
    (folder / name).write_text("".join(json.dumps({"messages": each}) + "\n" for each in lines))
    return folder / name


def job(folder: Path, eval_interval: int | None = None, **data: Any) -> Job:
    given = {"files": ("chat.jsonl",), "seq_len": 300} | data
    batch, train = sections.Batch(global_size=4), sections.Train(eval_interval=eval_interval)
    return resolve(
        sections.Spec(model=GPT, data=ChatData(**given), batch=batch, train=train), 1, str(folder / "cfg.py")
    )


def counted(labels: torch.Tensor) -> list[str]:
    """Return the learned texts of bytes, run by run."""
    text = "".join(chr(label) if label >= 0 else "\0" for label in labels.tolist())
    return [part for part in text.split("\0") if part]


def test_bytes_of_answers_are_learned(tmp_path: Path) -> None:
    written(tmp_path)
    config = job(tmp_path, eval_fraction=0.2)
    assert not all_counted(config)
    source = find_source(config)
    samples, held_out = make_samples(config, source.train, ()), make_samples(config, source.held_out, ())
    assert (samples.num_samples, held_out.num_samples) == (16, 4), "the last ones are held out"
    ids, labels = samples.batch([1], [0])
    assert bytes(ids[0].tolist()).startswith(b"<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n")
    assert counted(labels[0]) == ["2<|im_end|>", "2<|im_end|>"]
    whole = make_samples(job(tmp_path, assistant_only_loss=False), find_source(config).train, ())
    assert counted(whole.batch([1], [0])[1][0])[0].startswith("|im_start|>user\n1+1?"), "all but the first token"


def test_what_is_cut_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path)
    config = job(tmp_path, seq_len=60, eval_fraction=0)
    with caplog.at_level(logging.INFO, "dslpar"):
        samples = make_samples(config, find_source(config).train, ())
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"{samples.num_samples} conversations are trained on; ")
    assert second == (
        "conversations trained on: 20 are truncated to seq_len + 1 = 61 tokens; "
        f"{20 - samples.num_samples} are left out, because no answer remains"
    )
    assert 0 < samples.num_samples < 20


def test_the_identity_is_of_what_is_said(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = find_source(job(tmp_path)).identity
    (tmp_path / "elsewhere").mkdir()
    written(tmp_path / "elsewhere", name="other.jsonl")
    assert find_source(job(tmp_path, files=("elsewhere",))).identity == before
    assert find_source(job(tmp_path, template=UNMARKED)).identity != before
    assert find_source(job(tmp_path, eval_fraction=0.3)).identity != before
    path.write_text(path.read_text().replace("1+1?", "1+1!"))
    assert find_source(job(tmp_path)).identity != before


def test_the_split_by_a_file(tmp_path: Path) -> None:
    written(tmp_path)
    written(tmp_path, 3, "held_out.jsonl")
    config = job(tmp_path, eval_path="held_out.jsonl")
    source = find_source(config)
    assert [make_samples(config, part, ()).num_samples for part in (source.train, source.held_out)] == [20, 3]


def refused(config: Job) -> Any:
    with pytest.raises(DslparError) as error:
        make_samples(config, find_source(config).train, ())
    (finding,) = error.value.findings
    return finding


def test_wrong_lines_are_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_text().splitlines()
    lines[3], lines[7] = '{"messages": [', '{"text": "x"}'
    path.write_text("\n".join(lines))
    found = refused(job(tmp_path))
    assert found.code == "BAT218"
    assert found.message == f"{path}:4: not valid JSON; 1 more of 20 lines are not conversations"


@pytest.mark.parametrize(
    ("data", "code", "key"),
    [
        ({"files": ("gone.jsonl",)}, "BAT201", "data.files.0"),
        ({"eval_path": "gone.jsonl"}, "BAT201", "data.eval_path"),
        ({"template": "gone.jinja"}, "BAT218", "data.template"),
        ({"template": UNMARKED.replace("m['content'] +", "loop.last | string +")}, "BAT219", "data.template"),
        ({"template": "{{ raise_exception('never') }}"}, "BAT219", "data.files"),
        ({"eval_fraction": 0.9}, "BAT210", "batch"),
        ({"seq_len": 16}, "BAT210", "batch"),
        ({"seq_len": 3000, "packing": True}, "BAT210", "batch"),
        ({"eval_fraction": 0, "eval_interval": 1}, "BAT203", "data"),
    ],
)
def test_what_is_refused(tmp_path: Path, data: dict[str, Any], code: str, key: str) -> None:
    written(tmp_path)
    found = refused(job(tmp_path, **data))
    assert (found.code, found.key) == (code, key), found.message


# ---- tokenizers ----


def trained(folder: Path, kind: str) -> Path:
    """Write a small tokenizer with ChatML's tokens, as the library does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    special = ["<unk>", "<|im_start|>", END, "<pad>"]
    if kind == "bpe":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(["user says assistant answers the question system 12 34 56 79 80"] * 9, trainer)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ids_and_masks_are_transformers_own(tmp_path: Path, kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    folder, path = trained(tmp_path / "tokenizer", kind), written(tmp_path)
    config = job(tmp_path, tokenizer=folder.name, template="chatml", eval_fraction=0)
    theirs: Any = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    samples = make_samples(config, find_source(config).train, ())
    for number, line in enumerate(path.read_text().splitlines()):
        encoded = theirs.apply_chat_template(
            json.loads(line)["messages"],
            chat_template=CHATML.text,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, labels = (part[0].tolist() for part in samples.batch([number], [0]))
        expected, mask = encoded["input_ids"], encoded["assistant_masks"]
        length = len(expected) - 1
        assert ids[:length] == expected[:-1]
        assert set(ids[length:]) <= {3}, "padded with the tokenizer's own"
        assert labels[:length] == [id if use else IGNORE_INDEX for id, use in zip(expected, mask, strict=True)][1:]
        assert 0 < sum(mask) < length


def test_a_character_of_several_tokens_is_learned_whole(tmp_path: Path) -> None:
    folder = trained(tmp_path / "tokenizer", "bpe")
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\N{GRINNING FACE}"}]
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 4)
    marked = "?{% generation %}{{ messages[1]['content'] }}{% endgeneration %}!"
    config = job(tmp_path, tokenizer=folder.name, template=marked, eval_fraction=0)
    _, labels = make_samples(config, find_source(config).train, ()).batch([0], [0])
    assert (labels >= 0).sum() == 4, "four bytes, of which each is a token"


def test_a_template_has_no_clock(tmp_path: Path) -> None:
    """Llama 3.1's writes today's date, so the learned text would change overnight."""
    dated = "{{ strftime_now('%d %b %Y') }}|" + CHATML.text
    (line,) = [json.loads(text) for text in written(tmp_path).read_text().splitlines()[:1]]
    said = Renderer(CHATML._replace(text=dated), answers_only=True)(Conversation(line["messages"]))
    assert said.text.startswith("26 Jul 2024|<|im_start|>")


def test_all_conversations_are_those_of_both_parts(tmp_path: Path) -> None:
    written(tmp_path)
    for data in ({}, {"eval_fraction": 0.5}, {"eval_path": "chat.jsonl"}):
        config = job(tmp_path, **data)
        source = find_source(config)
        (whole,) = all_parts(source)
        assert whole.conversations is not None
        lines = len((tmp_path / "chat.jsonl").read_text().splitlines())
        assert (whole.conversations.start, whole.conversations.stop) == (0, lines), data
        assert not whole.conversations.training
