"""Hints are right: a suggested value removes the finding and adds none."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dslpar.core.errors import Finding
from tests.support.lint import MODEL, codes, findings, wrong

SIZES = st.integers(1, 40)
LAYOUTS = st.sampled_from(
    [
        "size=4, mode='1d'",
        "size=4, mode='1d', sequence=True",
        "size=4, mode='2d'",
        "size=8, mode='2.5d', depth=2",
        "size=8, mode='3d'",
        "size=8, mode='3d', residual='hidden', inner='heads'",
        "size=6, mode='cuboid', shape=(1, 2, 3)",
        "size=6, mode='cuboid', shape=(3, 2, 1)",
        "size=8, mode='cuboid', shape=(4, 2, 1)",
        "size=4, mode='sequence'",
        "size=4, mode='sequence', impl='ulysses'",
    ]
)


def config(values: dict[str, int | None], positions: str, tensor: str) -> str:
    names = ("hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size", "max_seq_len")
    model = ", ".join(f"{name}={values[name]}" for name in names)
    return (
        f"model = dict(type='GPT', num_layers=8, vocab_size=256, {model}, positions={positions!r})\n"
        f"parallel = dict(tensor=dict({tensor}))\n"
        f"data = dict(seq_len={values['seq_len']})\n"
        f"batch = dict(micro_size={values['micro_size']})\n"
    )


def choices(finding: Finding) -> list[dict[str, int]]:
    """Return the sizes that a hint suggests: for its own key ("4 or 8"), for one other, or for several together."""
    offered = finding.help.removeprefix("nearest legal: ")
    assert offered != finding.help, finding
    if " with " in offered:
        return [{name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", offered)}]
    name, _, sizes = offered.rpartition("=")
    return [{name or finding.key.rpartition(".")[2]: int(size)} for size in sizes.split(" or ")]


EXAMPLES = st.tuples(
    st.tuples(SIZES, SIZES, SIZES, SIZES, SIZES),
    st.none() | st.integers(1, 8),
    st.sampled_from(["learned", "rotary"]),
    st.booleans(),
    LAYOUTS,
)


@pytest.mark.prove
@given(EXAMPLES)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_all_suggestions_at_once_are_legal(example: tuple[tuple[int, ...], int | None, str, bool, str]) -> None:
    assert_suggestions_are_legal(*example)


@given(EXAMPLES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_suggestions_at_once_are_legal(example: tuple[tuple[int, ...], int | None, str, bool, str]) -> None:
    assert_suggestions_are_legal(*example)


def assert_suggestions_are_legal(
    sizes: tuple[int, ...], kv_heads: int | None, positions: str, whole_heads: bool, tensor: str
) -> None:
    """Every finding has a hint; with any combination of the suggested sizes, nothing more is found."""
    hidden, heads, ffn, seq_len, micro_size = sizes
    values = {
        "hidden_size": hidden * heads if whole_heads else hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": ffn,
        "seq_len": seq_len,
        "max_seq_len": max(48, seq_len),
        "micro_size": micro_size,
    }
    world = 6 if "size=6" in tensor else 8
    found = wrong(config(values, positions, tensor), world)
    offers = {repr(choices(finding)): choices(finding) for finding in found}
    for taken in product(*offers.values()):
        repaired = {name: size for one in taken for name, size in one.items()}
        assert wrong(config(values | repaired, positions, tensor), world) == [], (found, repaired)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "hidden", "hint"),
    [
        (6, None, 48, "num_heads=4 or 8"),
        (8, None, 50, "hidden_size=48 or 56"),
        (6, None, 50, "num_heads=4 with hidden_size=48"),
        (6, None, 44, "num_heads=4 or 44"),
        (6, None, 46, "num_heads=4 with hidden_size=44"),
        (8, 3, 48, "num_kv_heads=4"),
        (8, 6, 48, "num_kv_heads=4 or 8"),
        (6, 3, 48, "num_heads=4 with num_kv_heads=4"),
        (12, 8, 48, "num_kv_heads=4 or 12"),
        (16, 8, 48, "nothing"),
    ],
)
def test_hints_change_as_few_sizes_as_possible(heads: int, kv_heads: int | None, hidden: int, hint: str) -> None:
    values = {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv_heads, "ffn_hidden_size": 64}
    text = config(values | {"seq_len": 48, "max_seq_len": 48, "micro_size": 1}, "learned", "size=4, mode='1d'")
    hints = {finding.help for finding in wrong(text)}
    assert hints == (set() if hint == "nothing" else {f"nearest legal: {hint}"})


def test_a_sequence_may_need_a_longer_table() -> None:
    text = config(
        {"hidden_size": 48, "num_heads": 4, "num_kv_heads": None, "ffn_hidden_size": 64, "micro_size": 1}
        | {"seq_len": 3, "max_seq_len": 3},
        "learned",
        "size=4, mode='1d', sequence=True",
    )
    assert [finding.help for finding in wrong(text)] == ["nearest legal: data.seq_len=4 with model.max_seq_len=4"]


BATCHES = st.tuples(SIZES, st.none() | st.integers(1, 6), st.none() | st.integers(1, 6), st.sampled_from(["1d", "2d"]))


@pytest.mark.prove
@given(BATCHES)
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
def test_hints_about_a_batch_fit(batch: tuple[int, int | None, int | None, str]) -> None:
    assert_hints_fit(*batch)


@given(BATCHES)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
def test_some_hints_about_a_batch_fit(batch: tuple[int, int | None, int | None, str]) -> None:
    assert_hints_fit(*batch)


def assert_hints_fit(whole: int, micro: int | None, accumulation: int | None, mode: str) -> None:
    sizes = {"global_size": whole, "micro_size": micro, "accumulation": accumulation}
    tensor = f"parallel = dict(tensor=dict(size=4, mode={mode!r}))\n"

    def text(batch: dict[str, int | None]) -> str:
        return MODEL + tensor + f"batch = dict({', '.join(f'{key}={size}' for key, size in batch.items())})\n"

    found = wrong(text(sizes))
    assume([finding.code for finding in found] == ["BAT101"])
    repairs = re.findall(r"(\w+)=(\d+)", found[0].help)
    assert repairs
    for key, size in repairs:
        assert wrong(text(sizes | {key: int(size)})) == [], (found[0], key, size)


@pytest.mark.parametrize(
    ("batch", "key", "hint"),
    [
        ("global_size=12, accumulation=3", "batch.global_size", "nothing"),
        ("global_size=12, accumulation=4", "batch.global_size", "global_size=8 or 16"),
        ("micro_size=3", "batch.micro_size", "nearest legal: 2 or 4"),
        ("global_size=6, micro_size=3", "batch.micro_size", "nearest legal: 2"),
        ("global_size=9, micro_size=3", "batch.micro_size", "choose a multiple of 2, and a global_size to fit"),
    ],
)
def test_hint_about_a_micro_batch_names_its_key(batch: str, key: str, hint: str) -> None:
    text = f"{MODEL}parallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = dict({batch})\n"
    found = [finding for finding in findings(text, 4) if finding.code == "BAT102"]
    assert [(finding.key, finding.help) for finding in found] == ([] if hint == "nothing" else [(key, hint)])


def test_a_micro_batch_is_checked_without_a_world() -> None:
    text = f"{MODEL}parallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = dict(micro_size=3)\n"
    assert codes(text, None) == ["BAT102", "CFG112"]
