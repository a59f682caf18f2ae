"""What help suggests is right: written in place of what was wrong, the finding is gone, and no other comes."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.lint.helpers import MODEL, codes, findings

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
        "size=4, mode='sequence'",
        "size=4, mode='sequence', impl='ulysses'",
    ]
)


def config(values: dict[str, int], tensor: str) -> str:
    model = ", ".join(f"{name}={values[name]}" for name in ("hidden_size", "num_heads", "ffn_hidden_size"))
    return (
        f"model = dict(type='GPT', num_layers=8, vocab_size=256, max_seq_len=48, {model})\n"
        f"parallel = dict(tensor=dict({tensor}))\n"
        f"data = dict(seq_len={values['seq_len']})\n"
        f"batch = dict(micro_size={values['micro_size']})\n"
    )


@given(SIZES, SIZES, SIZES, SIZES, SIZES, LAYOUTS)
@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
def test_nearest_legal_sizes_are_legal(
    hidden: int, heads: int, ffn: int, seq_len: int, micro_size: int, tensor: str
) -> None:
    values = {
        "hidden_size": hidden * heads,
        "num_heads": heads,
        "ffn_hidden_size": ffn,
        "seq_len": seq_len,
        "micro_size": micro_size,
    }
    world = 6 if "size=6" in tensor else 8
    found = findings(config(values, tensor), world)
    assume(len(found) == 1)
    suggested = re.findall(r"\d+", found[0].help.removeprefix("nearest legal: "))
    assert suggested
    key = found[0].key.rpartition(".")[2]
    if not found[0].help.startswith("nearest legal"):
        assert found[0].code == "TEN201"  # no number of heads fits this hidden_size
        return
    for size in map(int, suggested):
        assert codes(config(values | {key: size}, tensor), world) == [], (found[0], size)


@given(SIZES, st.none() | st.integers(1, 6), st.none() | st.integers(1, 6), st.sampled_from(["1d", "2d"]))
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
def test_repairs_of_a_batch_fit(whole: int, micro: int | None, accumulation: int | None, mode: str) -> None:
    sizes = {"global_size": whole, "micro_size": micro, "accumulation": accumulation}
    tensor = f"parallel = dict(tensor=dict(size=4, mode={mode!r}))\n"

    def text(batch: dict[str, int | None]) -> str:
        return MODEL + tensor + f"batch = dict({', '.join(f'{key}={size}' for key, size in batch.items())})\n"

    found = findings(text(sizes))
    assume([finding.code for finding in found] == ["BAT101"])
    repairs = re.findall(r"(\w+)=(\d+)", found[0].help)
    assert repairs
    for key, size in repairs:
        assert codes(text(sizes | {key: int(size)})) == [], (found[0], key, size)


@pytest.mark.parametrize(
    ("batch", "key", "help_"),
    [
        ("global_size=12, accumulation=3", "batch.global_size", "nothing"),
        ("global_size=12, accumulation=4", "batch.global_size", "global_size=8 or 16"),
        ("micro_size=3", "batch.micro_size", "nearest legal: 2 or 4"),
        ("global_size=6, micro_size=3", "batch.micro_size", "nearest legal: 2"),
        ("global_size=9, micro_size=3", "batch.micro_size", "a multiple of 2, and a global_size to fit"),
    ],
)
def test_help_of_a_micro_batch_names_its_key(batch: str, key: str, help_: str) -> None:
    text = f"{MODEL}parallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = dict({batch})\n"
    found = [finding for finding in findings(text, 4) if finding.code == "BAT102"]
    assert [(finding.key, finding.help) for finding in found] == ([] if help_ == "nothing" else [(key, help_)])


def test_a_micro_batch_is_checked_without_a_world() -> None:
    text = f"{MODEL}parallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = dict(micro_size=3)\n"
    assert codes(text, None) == ["BAT102", "CFG112"]
