"""FIT: jobs that need more memory than a known device has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dslpar.core.errors import Finding
from dslpar.forecast import local_device
from dslpar.forecast.machine import machine_of
from dslpar.forecast.plan import forecast
from dslpar.forecast.workload import workload_of
from dslpar.linter import check
from tests.support.helps import Linted

SIZES = "num_layers=24, hidden_size=4096, num_heads=32, vocab_size=32000, max_seq_len=2048"
HALF = "precision = 'bf16'\nzero = dict(stage=1)\n"
BATCH = "batch = dict(global_size=256, micro_size=32)\n"
H100 = "cluster = dict(device='h100-80g')\n"
TEXT = f"model = dict(type='GPT', {SIZES})\n{HALF}{BATCH}{H100}"


def found(text: str, code: str, world: int | None = 8, hostfile: str | None = None) -> list[Finding]:
    return [each for each in Linted(text, world, hostfile=hostfile).findings() if each.code == code]


def test_what_does_not_fit_is_an_error_with_a_repair() -> None:
    (finding,) = found(TEXT, "FIT101")
    assert finding.severity == "error"
    assert "needs" in finding.message
    assert "of 79.6 (h100-80g)" in finding.message
    assert finding.key == "batch.micro_size"
    words = finding.help.partition(" (")[0].split(" with ")
    overridden = Linted(TEXT, overrides=tuple(words)).findings()
    assert not [each for each in overridden if each.severity == "error" or each.code.startswith("FIT")]


def test_without_a_device_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert found(TEXT.replace(H100, ""), "FIT101") == []
    assert found(TEXT, "FIT101", world=None) == []


LLAMA3 = """\
model = dict(type='transformers.LlamaForCausalLM', config=dict(hidden_size=4096, intermediate_size=14336,
             num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256){})
data = dict(seq_len=2048)
precision = 'bf16'
zero = 1
batch = dict(micro_size=1)
cluster = dict(device='a100-40g')
"""


def test_adapters_fit_where_training_it_all_does_not() -> None:
    assert found(LLAMA3.format(""), "FIT101", 1)
    assert found(LLAMA3.format(", lora=dict(r=16)"), "FIT101", 1) == []


def test_a_hostfile_names_the_device() -> None:
    hosts = "# device: h100-80g\nnode1 slots=8\n"
    assert found(TEXT.replace(H100, ""), "FIT101", None, hosts)
    assert found(TEXT.replace(H100, ""), "FIT101", None, "node1 slots=8\n") == []


def test_the_config_comes_before_the_hostfile() -> None:
    hosts = "# device: a100-40g\nnode1 slots=8\n"
    (finding,) = found(TEXT, "FIT101", None, hosts)
    assert "h100-80g" in finding.message


def test_this_machines_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = tmp_path / "0000:01:00.0"
    gpu.mkdir()
    (gpu / "information").write_text("Model: \t NVIDIA H100 80GB HBM3\nIRQ:   \t 35\n")
    monkeypatch.setattr(local_device, "NVIDIA", str(tmp_path))
    assert local_device.local_device() is not None
    assert found(TEXT.replace(H100, ""), "FIT101")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "information").write_text("Model: NVIDIA A100-SXM4-40GB\n")
    assert local_device.local_device() is None, "two kinds"


def test_an_illegal_layout_has_no_forecast() -> None:
    assert found(TEXT.replace("num_heads=32", "num_heads=33"), "FIT101") == []
    assert found(TEXT.replace("global_size=256", "global_size=257"), "FIT101") == []


def test_unknown_devices() -> None:
    (finding,) = found(TEXT.replace("h100-80g", "h100-80gb"), "FIT103")
    assert finding.help == "did you mean 'h100-80g'?"
    assert found(TEXT.replace("h100-80g", "h100-80gb"), "FIT101") == []


def test_near_the_end_of_memory_is_a_warning() -> None:
    codes = {}
    for hidden in range(2048, 5120, 128):
        text = TEXT.replace("micro_size=32", "micro_size=4").replace(
            "hidden_size=4096, num_heads=32", f"hidden_size={hidden}, num_heads={hidden // 128}"
        )
        codes[hidden] = tuple(each.code for each in Linted(text).findings() if each.code.startswith("FIT"))
    order = list(dict.fromkeys(codes.values()))
    assert order == [(), ("FIT102",), ("FIT101",)], "as the model grows"


def test_lint_and_plan_give_one_verdict() -> None:
    """FIT101 and the verdict "does not fit" begin at all of the memory, FIT102 above 92 % of it."""
    seen = set()
    for hidden in range(3072, 5120, 128):
        text = TEXT.replace("micro_size=32", "micro_size=4").replace(
            "hidden_size=4096, num_heads=32", f"hidden_size={hidden}, num_heads={hidden // 128}"
        )
        codes = [each.code for each in Linted(text).findings() if each.code.startswith("FIT")]
        job = check.check(check.load_text(text, "config.py"), 8, forecasts=False).job
        workload = workload_of(job)
        assert workload is not None
        made = forecast(workload, machine_of(job, calibrated=False))
        assert ("FIT101" in codes) == (made.verdict == "does not fit") == (made.share > 1.0)
        assert ("FIT102" in codes) == (0.92 < made.share <= 1.0)
        seen.add((made.verdict, *codes))
    assert seen == {("fits",), ("tight",), ("tight", "FIT102"), ("does not fit", "FIT101")}


def test_models_without_costs_are_passed_over() -> None:
    text = "model = dict(type='Sequential', layers_cfg=[dict(type='Linear', in_features=4, out_features=4)])\n" + H100
    assert not [each for each in Linted(text).findings() if each.code.startswith("FIT")]


# Shapes -------------------------------------------------------------------------------------------------------------

WIDE = (
    "model = dict(type='GPT', num_layers=4, hidden_size={}, num_heads={}, vocab_size=50304, max_seq_len=2048)\n"
    "parallel = dict(tensor=dict(size=8, mode='1d'))\n" + HALF + "batch = dict(global_size=8)\n"
)


@pytest.mark.parametrize(
    ("hidden", "heads", "key", "hint"),
    [
        (13824, 128, "model.num_heads", "model.num_heads=72: head size 192"),
        (14400, 96, "model.hidden_size", "model.hidden_size=13824"),
    ],
)
def test_shapes_off_the_tiles(hidden: int, heads: int, key: str, hint: str) -> None:
    text = WIDE.format(hidden, heads) + H100
    finding = next(each for each in found(text, "PERF114") if each.key == key)
    assert finding.help.startswith(hint.partition(":")[0].partition("=")[0])
    word = finding.help.partition(":")[0]
    left = Linted(text, overrides=(word,)).findings()
    assert not [each for each in left if (each.code, each.key) == ("PERF114", key) or each.severity == "error"]


def test_shapes_on_the_tiles_or_of_no_device() -> None:
    assert found(WIDE.format(12288, 96) + H100, "PERF114") == []
    assert found(WIDE.format(13824, 128), "PERF114") == []
    assert found(WIDE.format(13824, 128).replace("'bf16'", "'fp32'") + H100, "PERF114") == []


CONTEXT = """
cluster = dict(device='{device}', nodes_of={per_node})
parallel = dict({parallel})
model = dict(type='GPT', num_layers=4, hidden_size=4096, num_heads=32, num_kv_heads={kv_heads}, vocab_size=32000,
             max_seq_len={seq_len})
precision = 'bf16'
zero = dict(stage=1)
batch = dict(micro_size=1, accumulation=8)
"""


def in_context(parallel: str, per_node: int, kv_heads: int, seq_len: int, device: str = "h100-80g") -> str:
    return CONTEXT.format(parallel=parallel, per_node=per_node, kv_heads=kv_heads, seq_len=seq_len, device=device)


@pytest.mark.parametrize(
    ("parallel", "sizes", "best", "followed"),
    [
        *(
            (context, sizes, "impl='hybrid', ulysses_size=4", "context=dict(size=8, impl='hybrid', ulysses_size=4)")
            for context, sizes in (
                ("context=dict(size=8, impl='ulysses')", (4, 8, 8192, "a100-40g")),
                ("context=dict(size=8, impl='hybrid')", (4, 8, 8192, "a100-40g")),
                ("context=8", (4, 8, 4096)),
            )
        ),
        (
            "tensor=dict(size=8, mode='sequence')",
            (4, 32, 4096),
            "impl='ulysses'",
            "tensor=dict(size=8, mode='sequence', impl='ulysses')",
        ),
    ],
)
def test_the_better_form_of_context_parallelism_is_named_in_numbers(
    parallel: str, sizes: tuple[Any, ...], best: str, followed: str
) -> None:
    (finding,) = found(in_context(parallel, *sizes), "PERF115")
    assert finding.help == best
    assert re.search(
        r"sends [\d,]+ elements per rank and layer, by [\w ]+ [\d,]+: a step takes \d\.\d+ times", finding.message
    )
    sends_more = "a100-40g" in sizes
    assert finding.message.endswith("'ulysses' waits for its exchange") == sends_more
    assert found(in_context(followed, *sizes), "PERF115") == []


@pytest.mark.parametrize(
    ("parallel", "sizes"),
    [
        ("context=dict(size=8, impl='ring')", (4, 8, 32768)),
        ("context=dict(size=8, impl='ulysses')", (8, 32, 4096)),
        ("context=dict(size=8, impl='ring')", (8, 4, 32768)),  # with 4 key heads, Ulysses over 8 ranks is illegal
        ("context=dict(size=8, impl='hybrid', ulysses_size=4)", (8, 4, 4096)),  # such short pieces wait for launches
        ("tensor=dict(size=8, mode='1d')", (8, 8, 4096)),
    ],
)
def test_the_best_form_has_no_finding(parallel: str, sizes: tuple[int, int, int]) -> None:
    assert found(in_context(parallel, *sizes), "PERF115") == []


def test_context_of_one_rank_beside_mode_sequence_is_spoken_of_as_that_mode() -> None:
    text = in_context("context=1, tensor=dict(size=8, mode='sequence')", 4, 32, 4096)
    (finding,) = found(text, "PERF115")
    assert (finding.help, finding.key) == ("impl='ulysses'", "parallel.tensor")


def test_hybrid_s_ranks_are_written_though_they_could_be_left_out() -> None:
    text = in_context("context=dict(size=16, impl='hybrid', ulysses_size=2)", 8, 8, 4096)
    (finding,) = found(text, "PERF115", 16)
    assert finding.help == "impl='hybrid', ulysses_size=8"
    assert found(text.replace("impl='hybrid', ulysses_size=2", finding.help), "PERF115", 16) == []
    (other,) = found(text.replace("num_kv_heads=8", "num_kv_heads=32"), "PERF115", 16)
    assert other.help == "impl='ulysses', without ulysses_size"


MIXTURE = """
cluster = dict(device='h100-80g', nodes_of={per_node})
parallel = dict(expert={size})
model = dict(type='transformers.MixtralForCausalLM',
             config=dict(num_hidden_layers={layers}, tie_word_embeddings=False, max_position_embeddings=4096))
data = dict(seq_len=4096)
precision = 'bf16'
zero = dict(stage=1)
batch = dict(micro_size=1, accumulation={steps})
"""


def test_experts_across_nodes_are_found_if_fewer_ranks_within_one_are_faster() -> None:
    text = MIXTURE.format(per_node=4, size=8, layers=2, steps=64)
    (finding,) = found(text, "PERF116")
    assert (finding.help, finding.key) == ("parallel.expert=4", "parallel.expert")
    assert re.search(r"all experts are on 8 ranks, and 4 ranks are on a node .* takes 1\.\d+ times", finding.message)
    assert found(text.replace("expert=8", "expert=4"), "PERF116") == []


@pytest.mark.parametrize(
    "sizes",
    [
        {"per_node": 8, "size": 8, "layers": 2, "steps": 64},  # within a node
        {"per_node": 4, "size": 8, "layers": 2, "steps": 1},  # reducing gradients over nodes would cost more
        {"per_node": 4, "size": 8, "layers": 14, "steps": 64},  # twice as many experts would not fit
    ],
)
def test_experts_across_nodes_are_not_found_if_nothing_is_better(sizes: dict[str, int]) -> None:
    assert found(MIXTURE.format(**sizes), "PERF116") == []


def test_what_is_not_legal_is_not_forecast() -> None:
    """The family's rule alone reports heads that do not divide; the memory of such a layout is not forecast."""
    text = (
        in_context("context=dict(size=8, impl='ulysses')", 8, 4, 65536) + "batch = dict(global_size=64, micro_size=32)"
    )
    codes = {each.code for each in Linted(text, 8).findings()}
    assert "TEN206" in codes
    assert not codes & {"FIT101", "FIT102", "PERF115"}


@pytest.mark.parametrize(("name", "goes"), [("Gemma2ForCausalLM", False), ("MistralForCausalLM", True)])
def test_a_repair_names_context_parallelism_where_the_model_goes_with_it(name: str, goes: bool) -> None:
    config = (
        "num_hidden_layers=8, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,"
        " vocab_size=32000, max_position_embeddings=65536, head_dim=128"
    )
    text = (
        f"model = dict(type='transformers.{name}', config=dict({config}))\n{H100}{HALF}"
        "data = dict(seq_len=65536)\nbatch = dict(global_size=16, micro_size=2)\n"
    )
    (finding,) = found(text, "FIT101")
    assert ("parallel.context" in finding.help) == goes
    if not goes:
        assert finding.help.startswith("choose more ranks, a larger device, or a smaller model"), (
            "its scores are capped"
        )
        return
    words = finding.help.partition(" (")[0].split(" with ")
    followed = Linted(text, overrides=tuple(words)).findings()
    assert not [each for each in followed if each.severity == "error"], followed


def test_without_a_device_no_form_is_said_to_be_slower() -> None:
    assert found(in_context("context=8", 4, 32, 4096).replace("cluster", "# cluster"), "PERF115") == []


def test_an_unknown_device_of_a_hostfile_is_told_at_its_place() -> None:
    (finding,) = found(TEXT.replace(H100, ""), "FIT103", None, "node1 slots=8\n# device: h100\n")
    assert (finding.location.path, finding.location.line, finding.location.column) == ("hosts", 2, 11)
    assert finding.help == "did you mean 'h100-80g'?"


def test_memory_needs_no_calibration() -> None:
    text = TEXT.replace(H100, "cluster = dict(device='h100-80g', calibration='no_such_file.json')\n")
    assert found(text, "FIT101")
