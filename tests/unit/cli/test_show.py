"""`dslpar show`: text, and its JSON contract."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dslpar.cli.main import main

SVG = "{http://www.w3.org/2000/svg}"


def test_show_text(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "8"]) == 0
    out = capsys.readouterr().out
    assert "pipeline 2 * data 2 * tensor 2 (1d: x 1, y 2, z 1)" in out
    assert "pipe   [0, 4]  [1, 5]  [2, 6]  [3, 7]" in out
    assert main(["show", str(config), "--world-size", "64"]) == 0
    assert "... 24 more ..." in capsys.readouterr().out


def test_show_json_has_the_contract(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "8", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown)[:6] == ["world_size", "parallel", "groups", "stages", "batch", "deepspeed"]
    assert list(shown)[6:] == ["divisors", "traffic", "schedule", "memory"]
    assert shown["parallel"]["order"] == ["pipe", "data", "tensor"]
    assert shown["stages"]["counts"] == [4, 4]
    assert shown["batch"] == {"global_size": 16, "micro_size": 1, "accumulation": 8}
    assert main(["show", str(config), "--world-size", "8", "--format", "json", "parallel.pipeline=1"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert (stages["auto_pipeline_stage_id"], stages["actual_pipeline_stage_id"]) == (None, None)


def test_show_lists_divisors_and_traffic(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["parallel={'tensor': {'size': 4, 'mode': '2d'}}", "model.num_kv_heads=6", "model.positions='rotary'"]
    argv += ["model.vocab_size=257", "batch={'micro_size': 4}"]
    assert main(["show", str(config), "--world-size", "8", *argv]) == 0
    out = capsys.readouterr().out
    for line in (
        "divides",
        "  batch.micro_size 4 by x = 2",
        "  model.num_heads 24 by y = 2, num_kv_heads = 6",
        "  model.num_kv_heads 6 by y = 2",
        "  model.hidden_size 96 by z * q = 2, y * q = 4, num_heads = 24, "
        "num_heads * 2 = 48 (features of num_kv_heads by y * q), num_heads * 2 = 48 (pairs of features for rotary "
        "positions)",
        "  model.ffn_hidden_size 384 by y * q = 4",
        "  model.vocab_size 260 by y * q = 4; 257 padded to 260",
        "sends, elements per rank for a micro-batch of 384 tokens, forward and backward",
    ):
        assert line in out.splitlines(), line
    assert main(["show", str(config), "--world-size", "8", "--format", "json", *argv]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"key": "model.num_kv_heads", "value": 6, "by": 2, "why": "y = 2"} in shown["divisors"]
    assert all(each["value"] % each["by"] == 0 < each["by"] for each in shown["divisors"])
    layer, model = (sum(shown["traffic"][name].values()) for name in ("layer", "model"))
    assert 8 * layer < model
    assert f"  a layer {layer:,} (" in out
    assert f"  less than 1d on 4 ranks: from {shown['traffic']['break_even_tokens']:,} tokens on" in out


def test_show_tells_heads_from_their_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4"
    config = tmp_path / "llama.py"
    config.write_text(
        "parallel = dict(tensor=dict(size=2, mode='1d'))\n"
        f"model = dict(type='transformers.LlamaForCausalLM', config=dict({sizes}, vocab_size=512))\n"
    )
    assert main(["show", str(config), "--world-size", "2"]) == 0
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if "num_key_value_heads" in line]
    assert shown[:2] == [
        "model.config.num_key_value_heads 4 by y = 2",
        "model.config.num_key_value_heads 32 features by y * q = 2",
    ]


def test_show_sums_the_traffic_of_all_stages(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "8"]) == 0
    assert "  all 2 stages " in capsys.readouterr().out


def test_show_of_one_rank_has_no_traffic(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "1", "--format", "json", "parallel=None"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["traffic"] is None
    assert [each["why"] for each in shown["divisors"]] == ["num_heads = 24"]


def test_show_has_the_schedule(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["parallel={'pipeline': 4}", "model.hidden_size=96000"]  # stages are equal: the head's cost is negligible
    assert main(["show", str(config), "--world-size", "8", *argv]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "  schedule 1f1b, 8 micro-batches: bubble 27.3 % (a rank is idle for this share of the step)" in out
    assert "  holds    micro-batches of activations, at most, by rank: 0: 4, 1: 3, 2: 2, 3: 1" in out
    assert main(["show", str(config), "--world-size", "8", "--format", "json", *argv]) == 0
    schedule = json.loads(capsys.readouterr().out)["schedule"]
    assert schedule.pop("bubble") == pytest.approx(3 / 11)
    assert schedule == {
        "type": "1f1b", "num_model_chunks": 1, "num_micro_batches": 8, "held": [4, 3, 2, 1], "deferred": [0] * 4
    }  # fmt: skip
    assert main(["show", str(config), "--world-size", "8", "--format", "json", "parallel={'data': 8}"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] is None


@pytest.mark.parametrize(
    ("schedule", "lines", "num_boxes"),
    [
        (
            "{'type': 'interleaved', 'num_model_chunks': 2}",
            (
                "interleaved of 2 chunks, 8 micro-batches: bubble 15.8 %",
                "0: 5.5, 1: 4.5, 2: 3.5, 3: 2.5",
            ),
            2 * 8 * 8,
        ),
        (
            "zero_bubble",
            ("zero_bubble, 8 micro-batches: bubble 11.1 %", "0: 4, 1: 4, 2: 4, 3: 4"),
            3 * 4 * 8,
        ),
        (
            "{'type': 'zero_bubble', 'num_model_chunks': 2}",
            ("zero_bubble of 2 chunks, 8 micro-batches: bubble 5.9 %", "0: 4, 1: 4"),
            3 * 8 * 8,
        ),
    ],
)
def test_show_of_other_schedules(
    config: Path, capsys: pytest.CaptureFixture[str], schedule: str, lines: tuple[str, str], num_boxes: int
) -> None:
    argv = ["parallel={'pipeline': 4}", "model.hidden_size=96000", "model.num_layers=8", f"schedule={schedule}"]
    assert main(["show", str(config), "--world-size", "8", *argv]) == 0
    out = capsys.readouterr().out
    assert all(line in out for line in lines)
    assert main(["show", str(config), "--world-size", "8", "--format", "svg", *argv]) == 0
    picture = ElementTree.fromstring(capsys.readouterr().out)
    assert len([each for each in picture.iter(f"{SVG}rect") if each.get("class") == "box"]) == num_boxes


def test_show_draws_the_schedule(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "8", "--format", "svg"]) == 0
    picture = ElementTree.fromstring(capsys.readouterr().out)
    boxes = [each for each in picture.iter(f"{SVG}rect") if each.get("class") == "box"]
    assert len(boxes) == 2 * 2 * 8
    assert "1f1b over 2 ranks, 8 micro-batches: bubble 1" in "".join(picture.itertext())
    assert main(["show", str(config), "--world-size", "8", "--format", "svg", "batch.accumulation=100000"]) == 0
    text = capsys.readouterr().out
    assert "1250 micro-batches" in text  # 5000 boxes
    assert "(the step has 100000)" in text


LARGE = ["model.hidden_size=24576", "model.num_layers=8", "model.vocab_size=50304"]


def test_show_tells_the_memory_of_the_binding_rank(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "8", *LARGE]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("  memory "))
    told = re.fullmatch(r"  memory   stage (\d) needs ([\d.]+) GiB, the most of all", line)
    assert told is not None
    assert main(["show", str(config), "--world-size", "8", "--format", "json", *LARGE]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["verdict"] is None
    assert (f"{memory['stage']}", f"{memory['bytes'] / 2**30:.1f}") == told.groups()


def test_with_a_device_show_has_the_verdict(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["show", str(config), "--world-size", "8", "cluster.device='h100-80g'"]
    assert main([*argv, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["verdict"] == "fits"
    assert main(argv) == 0
    assert " GiB, the most of all (h100-80g has 79.6: fits)\n" in capsys.readouterr().out


def test_a_hostfile_names_the_device(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# device: a100-40g\nnode1 slots=4\nnode2 slots=4\n")
    assert main(["show", str(config), "--hostfile", str(hosts), "--format", "html"]) == 0
    out = capsys.readouterr().out
    assert "8 ranks in nodes of 4" in out
    assert "a100-40g" in out


def test_show_of_a_model_whose_costs_are_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "cfg.py"
    config.write_text("model = dict(type='torchvision.models.resnet18')\n")
    assert main(["show", str(config), "--world-size", "2", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] is None
    assert main(["show", str(config), "--world-size", "2"]) == 0
    assert "  memory " not in capsys.readouterr().out
    assert main(["show", str(config), "--world-size", "2", "--format", "html"]) == 0
    assert "The memory of this model's layers is unknown" in capsys.readouterr().out


def test_a_page_and_its_pictures_in_a_folder(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["show", str(config), "--world-size", "8", "cluster.device='h100-80g'", "--format", "html"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    folder = tmp_path / "new" / "pages"
    assert main([*argv, "--output-dir", str(folder)]) == 0
    assert capsys.readouterr().out == ""
    assert (folder / "page.html").read_text() == printed
    files = {"page.html", "mesh.svg", "stages.svg", "schedule.svg", "memory.svg", "traffic.svg"}
    assert {path.name for path in folder.iterdir()} == files
    for path in folder.glob("*.svg"):
        ElementTree.parse(path)


def test_output_dir_needs_a_page_and_a_folder(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["show", str(config), "--world-size", "8", "--output-dir"]
    with pytest.raises(SystemExit):
        main([*argv, "pages"])
    assert "--output-dir goes with --format html" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*argv, str(config), "--format", "html"])
    assert "cannot write to " in capsys.readouterr().err


def test_show_prints_findings_and_stops(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "6"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, "PAR101" in captured.err) == ("", True)
