"""`dslpar policy`: what it prints for a class, and what it finds out about it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers

from dslpar.cli.main import main
from dslpar.policies import check
from dslpar.policies.check import Subject
from dslpar.policies.miniature import shrunk
from dslpar.schema.sections import TensorParallel
from dslpar.schema.transformers_policies import POLICIES, Policy

TWO = {"1d 2": TensorParallel(size=2, mode="1d"), "ring 2": TensorParallel(size=2, mode="sequence")}


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "show", "GPT2LMHeadModel"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:3] == ["blocks: transformer.h", "regions:", "  transformer.h.*.attn: ('c_attn',)"]
    layers = "transformer.wte, front, transformer.h.0, transformer.h.1, transformer.h.2, back, lm_head (tied)"
    assert shown[-1] == f"layers: {layers}"


def test_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring refuses a soft cap, which is no error."""
    monkeypatch.setattr(check, "MODES", TWO)
    monkeypatch.setattr(check.check, "__defaults__", (TWO,))
    assert main(["policy", "check", "Gemma2ForCausalLM", "num_hidden_layers=2"]) == 0
    *rows, help = capsys.readouterr().out.splitlines()
    assert help == "help: use a layout that keeps sequences whole"
    first, second = (line.split(maxsplit=3) for line in rows)
    assert first[:3] == ["1d", "2", "exact"]
    assert second[:3] == ["ring", "2", "refused"]
    assert "softcap=" in second[3]


@pytest.mark.parametrize(
    "argv",
    [
        ["BloomForCausalLM"],  # nn.Softmax calls torch's function with arguments of its own
        ["XLMRobertaForMaskedLM", "--policy", "RobertaForMaskedLM"],  # the tied weight's first name is the head's
        ["StableLmForCausalLM", "--policy", "LlamaForCausalLM"],  # a policy that is derived
        ["OlmoForCausalLM", "clip_qkv=0.5"],  # it changes q, k and v in place
        pytest.param(["SwinForImageClassification"], marks=pytest.mark.prove),  # two seconds each: `make test` has
        pytest.param(["Gemma4ForCausalLM", "hidden_size_per_layer_input=0"], marks=pytest.mark.prove),  # the others
        [
            *("BioGptForCausalLM", "--policy"),
            "dict(blocks=['biogpt.layers'], regions={'biogpt.layers.*.self_attn': ['k_proj', 'v_proj', 'q_proj']},"
            " outward=['biogpt.layers.*.self_attn.out_proj', 'biogpt.layers.*.fc2'], inward=['biogpt.layers.*.fc1'])",
        ],
    ],
    ids=lambda argv: argv[0],
)
def test_check_of_classes_and_policies(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.check, "__defaults__", ({"1d 2": TWO["1d 2"]},))
    assert main(["policy", "check", *argv]) == 0
    (row,) = capsys.readouterr().out.splitlines()
    assert row.split()[2] == "exact"
    assert "dropout" not in row


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["WhisperForConditionalGeneration"], "TEN234 .*takes input_features.*\nhelp: dslpar.initialize"),
        (
            ["LlavaForConditionalGeneration"],
            "TEN234 .*takes pixel_values.*\nhelp: type='transformers.LlamaForCausalLM'",
        ),
        (["MambaForCausalLM"], "TEN234 .*\nhelp: dslpar.initialize"),
        (["FalconForCausalLM"], "TEN234 .*\nhelp: dslpar.initialize"),
        (["Gemma4ForCausalLM"], "TEN234 .*\nhelp: hidden_size_per_layer_input=0"),
        (["XLMRobertaForMaskedLM"], "TEN234 .*\nhelp: policy='RobertaForMaskedLM'"),
        (["LlamaForCausalLM", "num_attention_heads=x"], "CFG223 .*LlamaConfig refuses its miniature"),
        (["LlamaForCausalLM", "--policy", "LamaForCausalLM"], "CFG223 .*\nhelp: did you mean 'LlamaForCausalLM'"),
        (["DbrxForCausalLM"], "TEN234 .*building it fails.*\nhelp: a config that transformers itself can build"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_check_ends_with_a_finding_that_says_what_to_write(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "check", *argv]) == 1
    assert re.search(said, capsys.readouterr().err)


OWN = "tests/support/own_decoder_config.py"
"""A user's model; docs/transformers.md shows its policy."""


@pytest.mark.parametrize(
    "modes",
    [TWO, pytest.param({}, marks=[pytest.mark.prove, pytest.mark.minutes(3)])],
    ids=["two modes", "all modes"],
)
def test_check_of_a_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, modes: dict[str, TensorParallel]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(check.check, "__defaults__", (modes or check.MODES,))
    assert main(["policy", "check", OWN]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(modes or check.MODES)
    assert all("exact" in row and "dropout" not in row for row in rows)


def test_docs_show_the_policy_of_the_example() -> None:
    written = (ROOT / OWN).read_text().replace('"', "'")
    assert written[written.index("model = ") :].strip() in (ROOT / "docs" / "transformers.md").read_text()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "dict(type='GPT', num_layers=1, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=8)",
            "neither a transformers class",
        ),
        ("dict(type='torch.nn.Linear', in_features=8, out_features=8)", "torch.nn.Linear is not a transformers model"),
    ],
)
def test_a_config_of_another_model(tmp_path: Path, model: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "cfg.py"
    config.write_text(f"model = {model}\n")
    with pytest.raises(SystemExit, match="2"):
        main(["policy", "check", str(config)])
    assert said in capsys.readouterr().err


def test_a_config_that_lint_finds_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "cfg.py"
    config.write_text("model = dict(type='transformers.LlamaForCausalLM', config=dict(), policy='Lama')\n")
    assert main(["policy", "check", str(config)]) == 1
    assert "CFG126" in capsys.readouterr().err


def test_copies_that_drop_otherwise_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own generator per rank, 1d's residual, which every rank holds in full, drifts apart."""
    subject = Subject(transformers.GPT2LMHeadModel, shrunk(transformers.GPT2Config(n_layer=1)))
    seed = torch.manual_seed
    monkeypatch.setattr("dslpar.policies.hf_parity.torch.manual_seed", lambda number: seed(number + os.getpid()))
    (row,) = check.check(subject, {"1d 2": TWO["1d 2"]})
    assert (row.outcome, row.tensor.partition(": ")[2]) == ("wrong", "with dropout, its copies get different gradients")


def test_a_policy_that_says_something_else_is_found_out() -> None:
    """q, k and v of GPT-2 are taken as one block of features, so each rank takes a third for a half."""
    told = POLICIES["GPT2LMHeadModel"]
    policy = Policy(told.blocks, told.regions, told.outward, local=told.local)
    subject = Subject(transformers.GPT2LMHeadModel, shrunk(transformers.GPT2Config()), policy)
    one, two = check.check(subject, {"one process": None, "1d 2": TWO["1d 2"]})
    assert (one.outcome, two.outcome) == ("exact", "wrong")
    assert two.worst > 1e-3


def test_a_class_without_a_policy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dslpar.policies.config.DERIVED", frozenset())
    assert main(["policy", "check", "XGLMForCausalLM"]) == 1
    assert "TEN234" in capsys.readouterr().err
    assert main(["policy", "show", "GraniteForCausalLM"]) == 1
    assert "policy='derived'" in capsys.readouterr().err
    assert main(["policy", "show", "GraniteForCausalLM", "--policy", "derived"]) == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["NoSuchModel"], "NoSuchModel is not a transformers model"),
        (["collections.OrderedDict"], "collections.OrderedDict is not a transformers model"),
        (["LlamaForCausalLM", "num_layers"], "'num_layers' is not key=value"),
        (["LlamaForCausalLM", "--policy", "dict(blocks=x)"], "malformed node"),
    ],
)
def test_wrong_usage(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["policy", "show", *argv])
    assert said in capsys.readouterr().err


def test_a_config_in_miniature_keeps_its_switches() -> None:
    config = transformers.Qwen2Config(use_sliding_window=True, attention_dropout=0.3, tie_word_embeddings=True)
    small = shrunk(config, {"num_attention_heads": 4})
    assert (small.hidden_size, small.num_attention_heads, small.vocab_size) == (64, 4, 70)
    assert (small.use_sliding_window, small.tie_word_embeddings, small.attention_dropout) == (True, True, 0.0)
    assert (config.hidden_size, config.attention_dropout) == (4096, 0.3)


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "Glm4Moe"])
def test_a_miniature_has_blocks_with_experts_and_groups_of_them(name: str) -> None:
    small = shrunk(getattr(transformers, f"{name}Config")(first_k_dense_replace=3))
    assert (small.first_k_dense_replace, small.num_hidden_layers) == (1, 3)
    assert (small.n_routed_experts, small.num_experts_per_tok, small.moe_intermediate_size) == (8, 2, 16)
    if name == "DeepseekV3":
        assert (small.n_group, small.topk_group, small.num_key_value_heads, small.head_dim) == (2, 1, 8, 4)


@pytest.mark.parametrize("action", ["show", "check"])
def test_help_fits_a_terminal(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["policy", action, "--help"])
    assert all(len(line) <= 100 for line in capsys.readouterr().out.splitlines())
