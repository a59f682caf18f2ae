"""`dslpar plan`: the report, its JSON contract, overrides that yield the suggested layouts, and --apply."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dslpar.cli.main import main
from dslpar.cli.plan import EPILOG
from dslpar.forecast.constants import MIXTURES
from dslpar.linter import check
from tests.support.paths import ROOT

LLAMA = """\
model = dict(type='GPT', num_layers=40, hidden_size=5120, num_heads=40, ffn_hidden_size=13824, vocab_size=32000,
             max_seq_len=4096, norm='rmsnorm', activation='swiglu', positions='rotary', bias=False)
precision = 'bf16'
zero = dict(stage=1)
batch = dict(global_size=512, micro_size=4)
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d', sequence=True))
"""
ON_H100 = ["--world-size", "64", "--device", "h100-80g"]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "llama.py"
    path.write_text(LLAMA)
    return path


def record(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()  # discards earlier output
    main(["plan", *argv, "--format", "json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_the_contract(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = record(capsys, str(llama), *ON_H100)
    names = ["verdict", "binding", "memory", "step_s", "tokens_per_s_gpu", "mfu_causal", "bubble", "repairs", "layouts"]
    assert list(made)[:9] == names
    assert made["verdict"] == "does not fit"
    assert list(made["binding"]) == ["rank", "stage", "bytes"]
    parts = ["weights", "gradients", "optimizer", "activations", "logits", "buffers", "outside", "total"]
    assert [each["stage"] for each in made["memory"]] == [0, 1]
    assert all(set(parts) <= set(each) for each in made["memory"])
    for each in made["memory"]:
        assert each["total"] == pytest.approx(sum(each[name] for name in (*parts[:-1], "fragmentation")), abs=8)
    assert made["binding"]["bytes"] == max(each["total"] for each in made["memory"])
    assert made["tokens_per_s_gpu"] == pytest.approx(512 * 4096 / made["step_s"] / 64)
    assert 0 < made["mfu_causal"] < 1
    assert made["repairs"]
    keys = ["overrides", "bytes", "step_s", "uncovered"]
    assert all(list(each) == keys for each in made["repairs"] + made["layouts"])
    assert [each["step_s"] for each in made["layouts"]] == sorted(each["step_s"] for each in made["layouts"])


def test_exit_status_tells_whether_it_fits(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(llama), *ON_H100]) == 1
    assert main(["plan", str(llama), *ON_H100, "batch.micro_size=1"]) == 0
    out = capsys.readouterr().out
    assert "DOES NOT FIT: stage 0 needs" in out
    assert "repairs, the smallest change first" in out


def test_each_suggestion_is_what_its_words_make(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = record(capsys, str(llama), *ON_H100)
    for suggestion in made["repairs"] + made["layouts"][:3]:
        words = suggestion["overrides"]
        assert check.lint(check.load(str(llama), words), 64) == [] or not any(
            each.severity == "error" for each in check.lint(check.load(str(llama), words), 64)
        )
        other = record(capsys, str(llama), *ON_H100, *words)
        assert other["verdict"] != "does not fit"
        assert other["binding"]["bytes"] == suggestion["bytes"]
        assert other["step_s"] == pytest.approx(suggestion["step_s"], rel=1e-12)


def test_fix_keeps_a_value(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = record(capsys, str(llama), *ON_H100, "--fix", "parallel.pipeline=4")
    assert len(made["memory"]) == 4
    assert made["layouts"]
    assert not any(word.startswith("parallel.pipeline") for each in made["layouts"] for word in each["overrides"])


def test_apply_writes_the_change(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repair = record(capsys, str(llama), *ON_H100)["repairs"][0]
    assert main(["plan", str(llama), *ON_H100, "--apply", "1"]) == 0
    (word,) = repair["overrides"]
    assert word.startswith("batch.micro_size=")
    assert llama.read_text() == LLAMA.replace("micro_size=4", word.removeprefix("batch."))
    after = record(capsys, str(llama), *ON_H100)
    assert after["verdict"] == "fits"
    assert after["binding"]["bytes"] == repair["bytes"]


def test_apply_adds_what_is_not_written(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama.write_text(LLAMA.replace("zero = dict(stage=1)\n", "zero = 1\n").replace("micro_size=4", "micro_size=2"))
    best = record(capsys, str(llama), *ON_H100)["layouts"][0]
    assert main(["plan", str(llama), *ON_H100, "--apply", "1"]) == 0
    after = record(capsys, str(llama), *ON_H100)
    assert after["step_s"] == pytest.approx(best["step_s"], rel=1e-12)
    assert after["layouts"][0]["overrides"] == []


def test_apply_changes_nothing_that_other_values_are_computed_from(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "SIZE = 4\n" + LLAMA.replace("micro_size=4", "micro_size=SIZE") + "train = dict(steps=100 * SIZE)\n"
    llama.write_text(text)
    assert main(["plan", str(llama), *ON_H100, "--apply", "1"]) == 0
    written = llama.read_text()
    assert written.startswith(text)
    config = check.load(str(llama))
    assert config.root.get("train.steps").plain() == 400  # type: ignore[union-attr]
    assert config.root.get("batch.micro_size").plain() < 4  # type: ignore[union-attr]


def test_apply_of_yaml_says_what_to_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "llama.yaml"
    config = check.load_text(LLAMA, "llama.py")
    path.write_text(json.dumps(config.root.plain()))
    before = path.read_text()
    assert main(["plan", str(path), *ON_H100, "--apply", "1"]) == 1
    assert "is not changed: set batch.micro_size=" in capsys.readouterr().err
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--world-size", "64", "--device", "h100-80gb"], "unknown device 'h100-80gb'; did you mean 'h100-80g'?"),
        (["--world-size", "64"], "no device is given, and this machine has no known one: --device h100-80g"),
        (["--device", "h100-80g"], "plan needs the number of ranks"),
        ([*ON_H100, "--apply", "99"], "--apply 99: there are"),
        ([*ON_H100, "--apply", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_wrong_usage(llama: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(llama), *argv])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_lint_errors_come_first(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(llama), *ON_H100, "model.num_heads=41"]) == 1
    captured = capsys.readouterr()
    assert "TEN205" in captured.err
    assert captured.out == ""


def test_a_model_without_costs_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.py"
    path.write_text("model = dict(type='my_package.MyModel')\nbatch = dict(global_size=64)\n")
    with pytest.raises(SystemExit):
        main(["plan", str(path), *ON_H100])
    assert "the costs of my_package.MyModel are unknown" in capsys.readouterr().err


LAYERS = """\
model = dict(type='Sequential', layers_cfg=[
    dict(type='Embedding', num_embeddings=256, embedding_dim=64), dict(type='LayerNorm', normalized_shape=64),
    dict(type='Linear', in_features=64, out_features=256), dict(type='GELU'),
    dict(type='Linear', in_features=256, out_features=256)])
data = dict(seq_len=32)
precision = 'bf16'
zero = 1
batch = dict(global_size=64, micro_size=4)
train = dict(steps=3)
"""


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    path = tmp_path / "layers.py"
    path.write_text(LAYERS)
    return path


def run_plan(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dslpar", "plan", *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_a_trace_tells_what_closed_forms_do_not(layers: Path) -> None:
    on = [str(layers), "--world-size", "4", "--device", "a100-80g"]
    without = run_plan(*on)
    assert without.returncode == 2
    assert "the costs of Sequential are unknown" in without.stderr
    assert "--trace builds it" in without.stderr
    done = run_plan(*on, "--trace", "parallel.pipeline=2")
    assert done.returncode == 0, done.stderr
    elements = 256 * 64 + 128 + 64 * 256 + 256 + 256 * 256 + 256
    assert f"Sequential (traced), {elements / 1000:.1f} k parameters, batch 64 of 32 tokens" in done.stdout
    assert "yours    pipeline 2, data 2" in done.stdout
    assert "the fastest that fit, of" in done.stdout
    assert "tensor" not in done.stdout.partition("the fastest of")[2], "plain layers cannot be cut"


@pytest.mark.parametrize("flag", [[], ["--trace"], ["--dry-run"]])
def test_a_program_s_model_needs_a_name(flag: list[str], layers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers.write_text("data = dict(seq_len=32)\nbatch = dict(global_size=64)\n")
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(layers), "--world-size", "4", "--device", "a100-80g", "--program", *flag])
    assert ended.value.code == 2
    assert "without --program, give --trace and model.type=MODULE.CLASS" in capsys.readouterr().err


@pytest.mark.prove
def test_samples_that_are_no_sequences_are_counted_by_themselves(tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "images.npz", images=np.zeros((200, 32, 32, 3), np.uint8), labels=np.zeros(200, int))
    path = tmp_path / "resnet.py"
    config = "dict(num_channels=3, embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], num_labels=10)"
    path.write_text(
        f"model = dict(type='transformers.ResNetForImageClassification', config={config})\n"
        f"data = dict(type='images', path={str(tmp_path / 'images.npz')!r})\n"
        "precision = 'bf16'\nzero = 1\nbatch = dict(global_size=64, micro_size=4)\ntrain = dict(steps=3)\n"
    )
    done = run_plan(str(path), "--world-size", "2", "--device", "a100-80g", "--trace")
    assert done.returncode == 0, done.stderr
    assert ", batch 64\n" in done.stdout
    assert "samples per second and device" in done.stdout


def test_what_cannot_be_traced_is_said(layers: Path) -> None:
    wrong = layers.read_text().replace("in_features=256", "in_features=255")
    layers.write_text(wrong)
    done = run_plan(str(layers), "--world-size", "1", "--device", "a100-80g", "--trace")
    assert done.returncode == 2
    assert "'4' cannot be traced: " in done.stderr
    assert "256" in done.stderr
    assert "255" in done.stderr


@pytest.mark.parametrize("flag", ["--dry-run", "--calibrate"])
def test_a_trace_goes_alone(layers: Path, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", str(layers), *ON_H100, "--trace", flag])
    assert "--trace" in capsys.readouterr().err


def test_a_transformers_model_has_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "llama.py"
    sizes = "num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8"
    path.write_text(
        f"model = dict(type='transformers.LlamaForCausalLM', config=dict({sizes}, intermediate_size=14336,"
        " vocab_size=128256, max_position_embeddings=8192))\nprecision = 'bf16'\nzero = dict(stage=2)\n"
        "batch = dict(global_size=64)\ndata = dict(seq_len=2048)\n"
    )
    assert main(["plan", str(path), *ON_H100]) == 0
    assert "LlamaForCausalLM, 8.03 B parameters" in capsys.readouterr().out


def test_no_torch_and_no_numpy_is_imported(llama: Path) -> None:
    code = (
        "import sys; from dslpar.cli.main import main; "
        f"main(['plan', {str(llama)!r}, '--world-size', '64', '--device', 'h100-80g']); "
        "print(sorted({'torch', 'numpy', 'deepspeed', 'yaml'} & set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == "[]\n"


def test_a_stated_data_size_does_not_bind_the_search(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama.write_text(LLAMA.replace("dict(pipeline=2", "dict(data=16, pipeline=2"))
    made = record(capsys, str(llama), *ON_H100)
    assert len(made["layouts"]) == 8
    assert any("parallel.data=None" in each["overrides"] for each in made["layouts"])


def test_a_tight_config_has_repairs_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt.py"
    for hidden in range(3072, 4608, 128):
        sizes = f"num_layers=24, hidden_size={hidden}, num_heads={hidden // 128}, vocab_size=32000, max_seq_len=2048"
        path.write_text(
            f"model = dict(type='GPT', {sizes})\nprecision = 'bf16'\nzero = 1\n"
            "batch = dict(global_size=64, micro_size=4)\n"
        )
        made = record(capsys, str(path), "--world-size", "8", "--device", "h100-80g")
        if made["verdict"] == "tight":
            break
    assert made["verdict"] == "tight"
    assert made["repairs"]
    for repair in made["repairs"]:
        assert repair["overrides"]
        assert repair["bytes"] <= 0.84 * made["device_bytes"]


def test_near_the_end_of_memory_it_is_tight_and_thrashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt.py"
    on_8 = (str(path), "--world-size", "8", "--device", "h100-80g")
    for hidden in range(4352, 5120, 128):
        sizes = f"num_layers=24, hidden_size={hidden}, num_heads={hidden // 128}, vocab_size=32000, max_seq_len=2048"
        path.write_text(
            f"model = dict(type='GPT', {sizes})\nprecision = 'bf16'\nzero = 1\n"
            "batch = dict(global_size=64, micro_size=4)\n"
        )
        made = record(capsys, *on_8)
        if made["binding"]["bytes"] > 0.92 * made["device_bytes"]:
            break
    assert 0.92 < made["binding"]["bytes"] / made["device_bytes"] <= 1
    assert made["verdict"] == "tight"
    assert made["repairs"]
    assert all(each["bytes"] <= 0.92 * made["device_bytes"] for each in made["repairs"] + made["layouts"])
    assert main(["plan", *on_8]) == 0
    assert "GiB; above 92 % it thrashes\n" in capsys.readouterr().out


def test_a_moco_is_cut_by_no_pipeline_and_steps_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "moco.py"
    path.write_text(
        "model = dict(type='MoCo', num_layers=12, hidden_size=768, num_heads=12)\nbatch = dict(global_size=1024)\n"
    )
    made = record(capsys, str(path), "--world-size", "8", "--device", "a100-80g")
    assert made["layouts"]
    words = [word for each in made["layouts"] for word in each["overrides"]]
    assert not [word for word in words if word.startswith(("parallel.pipeline", "batch.accumulation"))]


def test_experts_are_sharded_by_zero_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mixtral.py"
    path.write_text(
        "model = dict(type='transformers.MixtralForCausalLM', config=dict(num_hidden_layers=32))\nprecision = 'bf16'\n"
        "zero = dict(stage=3)\nbatch = dict(global_size=64)\ndata = dict(seq_len=2048)\n"
    )
    (stage,) = record(capsys, str(path), *ON_H100)["memory"]
    assert stage["weights"] < 5e9, "93 GB over 64 ranks"


def test_experts_over_ranks_are_reported_at_the_even_load_and_at_twice_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mixtral.py"
    path.write_text(
        "model = dict(type='transformers.MixtralForCausalLM', config=dict(num_hidden_layers=32))\nprecision = 'bf16'\n"
        "zero = dict(stage=1)\nbatch = dict(global_size=64, micro_size=1)\ndata = dict(seq_len=2048)\n"
        "parallel = dict(pipeline=4, expert=8)\n"
    )
    made = record(capsys, str(path), *ON_H100)
    uneven = made["uneven_experts"]
    assert uneven["load"] == 2
    assert uneven["bytes"] > made["binding"]["bytes"]
    assert main(["plan", str(path), *ON_H100]) == 0
    text = capsys.readouterr().out
    assert "MixtralForCausalLM, 46.7 B parameters" in text, "of the model, not of a rank"
    assert "yours    pipeline 4, data 16, expert 8, ZeRO 1" in text
    assert "over 16 replicas, experts over 2 (ZeRO 1)" in text
    assert f"  {uneven['bytes'] / 2**30:.1f} GiB if a rank's experts get 2 times the even load" in text
    assert (
        "no fitted run has a mixture that sends its tokens: the error is that of published steps of mixtures\n" in text
    )
    marked = re.search(r"\?  \+- (\d\d) % in half of the cases, as no fitted run has .*", text)
    assert marked is None or int(marked[1]) >= round(100 * MIXTURES.half), (
        "no option is more certain than its own error"
    )
    assert "per step on axis e, within a node" in text
    assert "per step on axis expert_data, between nodes" in text
    assert main(["show", str(path), "--world-size", "64"]) == 0
    assert f"  experts  {uneven['bytes'] / 2**30:.1f} GiB if a rank's experts" in capsys.readouterr().out
    zero_bubble = record(capsys, str(path), *ON_H100, "schedule.type=zero_bubble")["error"]
    assert zero_bubble["effects"] == ["zero_bubble", "a mixture that sends its tokens"]
    assert zero_bubble["uncovered"] == ["zero_bubble"]
    main(["plan", str(path), *ON_H100, "schedule.type=zero_bubble"])
    assert "effect left out or that of published steps of mixtures, whichever is larger\n" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "load"), [(1.25, 1.25), (3, 2.0), (1, None)])
def test_a_capacity_bounds_the_uneven_load(
    factor: float, load: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(
        "model = dict(type='GPT', num_layers=4, hidden_size=1024, num_heads=16, vocab_size=32000, max_seq_len=2048,\n"
        f"             experts=dict(num=8, capacity_factor={factor}))\n"
        "batch = dict(global_size=64, micro_size=1)\nparallel = dict(expert=8)\n"
    )
    uneven = record(capsys, str(path), *ON_H100)["uneven_experts"]
    assert (uneven and uneven["load"]) == load


def test_a_screen_has_one_bubble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages and two micro-batches idle (S-1) / (m+S-1) of the step: for lint, plan and show, as text and JSON."""
    path = tmp_path / "gpt.py"
    path.write_text(
        "model = dict(type='GPT', num_layers=24, hidden_size=1024, num_heads=16, max_seq_len=1024, vocab_size=50304)\n"
        "parallel = dict(tensor=dict(size=2, sequence=True, mode='1d'), pipeline=dict(size=2))\n"
        "precision = 'fp16'\nzero = 1\nbatch = dict(micro_size=4, global_size=16)\n"
    )
    on_8 = (str(path), "--world-size", "8", "--device", "h100-80g")
    assert main(["plan", *on_8]) == 0
    out, err = capsys.readouterr()
    assert "2 stages are idle 33.3 % of the step" in err
    assert "         bubble 33.3 % (a rank is idle for this share of the forwards and backwards)\n" in out
    alone = next(line for line in out.splitlines() if "pipeline 2, data 4, ZeRO 1, micro 4 x 1" in line)
    assert " 50.0 %" in alone, "two stages and one micro-batch"
    (times,) = [line for line in out.splitlines() if line.startswith("         time: ")]
    assert "bubble" not in times, "they are seconds"
    assert record(capsys, *on_8)["bubble"] == pytest.approx(1 / 3)
    main(["show", str(path), "--world-size", "8"])
    assert "2 micro-batches: bubble 33.3 % (a rank is idle" in capsys.readouterr().out


OFFLOADED = """\
model = dict(type='GPT', num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336,
             vocab_size=128256, max_seq_len=4096, norm='rmsnorm', activation='swiglu', positions='rotary', bias=False,
             tie_embeddings=False)
zero = dict(stage=3, offload_optimizer=dict(device='cpu', pin_memory=True), offload_param=dict(device='cpu'))
precision = 'bf16'
batch = dict(global_size=64, micro_size=4)
"""


def test_offload_is_dropped_where_less_of_it_is_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "llama.py"
    path.write_text(OFFLOADED)
    on_8 = (str(path), "--world-size", "8", "--device", "h100-80g")
    with_offload = record(capsys, *on_8, "--fix", "zero.offload_optimizer.device=cpu")
    made = record(capsys, *on_8)
    first = made["layouts"][0]
    assert {"zero.offload_optimizer=None", "zero.offload_param=None"} <= set(first["overrides"])
    assert first["step_s"] < with_offload["layouts"][0]["step_s"], "a fixed key keeps its offload"
    assert (first["uncovered"], made["error"]["uncovered"]) == ([], ["offload"])
    # 8.03 B weights: masters, two moments and gradients in fp32, and bf16 weights.
    assert made["host_bytes"] == pytest.approx(8.03e9 * (4 * 4 + 2) / 8, rel=0.01)
    main(["plan", *on_8])
    out = capsys.readouterr().out
    assert "yours    data 8, ZeRO 3, micro 4 x 2, offload of optimizer and weights\n" in out
    assert f"  host memory    {made['host_bytes'] / 2**30:7.1f}  offloaded," in out
    assert "no fitted run has offload: the error is the largest of any effect left out\n" in out
    assert re.search(r"yours takes 1\.\d\d times as long as the first \(\+- \d\d % in half of the cases\)", out)
    assert main(["plan", *on_8, *first["overrides"]]) == 0
    assert "never measured" in capsys.readouterr().out


def test_where_nothing_fits_bf16_and_offload_are_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt.py"
    path.write_text(
        "model = dict(type='GPT', num_layers=48, hidden_size=8192, num_heads=64, vocab_size=32000, max_seq_len=2048)\n"
        "batch = dict(global_size=64, micro_size=4)\nparallel = dict(pipeline=2)\n"
    )
    on_8 = (str(path), "--world-size", "8", "--device", "a100-40g")
    made = record(capsys, *on_8)
    assert made["repairs"] == made["layouts"] == []
    changes = [" ".join(each["overrides"]) for each in made["remedies"]]
    offered = [("precision=bf16" in each, "offload_optimizer=" in each, "offload_param=" in each) for each in changes]
    assert offered == [
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, True, True),
        (True, True, True),
    ]
    fits = [each["bytes"] <= 0.92 * made["device_bytes"] for each in made["remedies"]]
    assert fits == [False, False, True, True, True]
    main(["plan", *on_8])
    table = capsys.readouterr().out.partition("other precision, ZeRO or offload, and what it leaves")[2]
    assert [line.endswith("DOES NOT FIT") for line in table.splitlines()[1:]] == [not each for each in fits]
    assert main(["plan", *on_8, "--apply", "5"]) == 0
    assert record(capsys, *on_8)["binding"]["bytes"] == made["remedies"][4]["bytes"]


def test_a_length_that_is_not_known_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt2.py"
    path.write_text(
        "model = dict(type='transformers.GPT2LMHeadModel', config=dict(n_layer=12))\nbatch = dict(global_size=64)\n"
    )
    with pytest.raises(SystemExit):
        main(["plan", str(path), *ON_H100])
    assert "set data.seq_len" in capsys.readouterr().err


def test_apply_writes_each_key_once(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(llama), *ON_H100, "batch.micro_size=8", "--apply", "1"]) == 0
    assert llama.read_text().count("micro_size") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--rank", "1"],
        ["--dry-run", "--apply", "1"],
        ["--calibrate", "--dry-run"],
        ["--calibrate", "batch.micro_size=1"],
    ],
)
def test_flags_that_would_be_ignored(llama: Path, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(llama), *ON_H100, *argv])
    assert stopped.value.code == 2
    assert " goes with" in capsys.readouterr().err


def test_a_tight_layout_repairs_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "plans" / "llama_13b_8_a100_40g.py"
    made = record(capsys, str(path), "--world-size", "8")
    assert made["verdict"] == "does not fit"
    assert made["layouts"]
    assert made["repairs"], "whatever fits repairs it"


def test_the_example_of_the_help_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [line for line in EPILOG.splitlines() if "configs/" in line]
    _, command, config, *words = line.partition("#")[0].split()
    assert main([command, str(ROOT / config), *words]) == 0
    assert "step     " in capsys.readouterr().out


# The device -------------------------------------------------------------------------------------------------------

SMALL = "model = dict(type='GPT', num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=64)\n"


@pytest.mark.parametrize(
    ("project", "config", "flags", "device"),
    [
        ("a100-80g", "", [], "a100-80g"),
        ("a100-80g", "cluster = dict(device='h100-80g')\n", [], "h100-80g"),
        ("a100-80g", "", ["--device", "h200"], "h200-141g"),
        ("B200", "", [], "b200-180g"),
        ("h100", "", ["--device", "a10"], "a10-24g"),  # the project's is not read
    ],
)
def test_the_device_of_the_project_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], project: str, config: str, flags: list[str], device: str
) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[tool.dslpar]\ndevice = "{project}"\n')
    (tmp_path / "cfg.py").write_text(SMALL + config)
    assert record(capsys, str(tmp_path / "cfg.py"), "--world-size", "2", *flags)["device"] == device


def test_an_unknown_device_of_the_project_is_reported_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.dslpar]\ndevice = "h100"\n')
    (tmp_path / "cfg.py").write_text(SMALL)
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path / "cfg.py"), "--world-size", "2"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{project}:2:1: CFG230 bad-project-settings: unknown device 'h100' in [tool.dslpar]" in said
    assert "did you mean 'h100-80g'?" in said


def test_apply_writes_a_key_into_its_section(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama.write_text(LLAMA.replace("zero = dict(stage=1)\n", "zero = 1\n").replace("micro_size=4", "micro_size=2"))
    before = llama.read_text()
    assert main(["plan", str(llama), *ON_H100, "--apply", "1"]) == 0
    after = llama.read_text()
    assert after.count("\n") == before.count("\n"), "no statement is added beside the sections"
    assert "As `dslpar plan` suggests" not in after
