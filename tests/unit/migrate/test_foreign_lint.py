"""Lint of other frameworks' configs: their checks, locations and names, and nothing crashes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.cli.main import main
from dslpar.core.errors import Finding
from dslpar.migrate import expression, framework_rules
from dslpar.migrate.foreign_lint import CODES, in_their_names, lint_source, lint_text
from dslpar.migrate.framework_rules import SEVERITIES, Entry, entries_of, rules_of
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import read_text

FOREIGN = Path(__file__).parents[2] / "support" / "foreign_configs"
FILES = sorted(path.name for path in resources.files("dslpar.migrate").joinpath("rules").iterdir())
CHECKS = [
    pytest.param(name.removesuffix(".txt"), entry, id=f"{name.removesuffix('.txt')}-{number}-{entry.subject}")
    for name in FILES
    for number, entry in enumerate(entries_of(name.removesuffix(".txt")))
    if entry.kind in SEVERITIES
]
WORLD = 8


def _text_of(name: str, example: str) -> tuple[str, str]:
    """Return the text and the path of an example of a rules file."""
    framework = TABLES[name].framework
    if ".sh" in framework.endings and not framework.arguments:  # else the examples are YAML
        start = framework.commands[0] if framework.commands else "torchrun pretrain_gpt.py --micro-batch-size 1"
        return f"{start} {example}\n", "train.sh"
    if ".toml" in framework.endings:
        return example.replace(" ; ", "\n") + "\n", "config.toml"
    if ".py" in framework.endings and example.startswith("ConfigContainer("):
        imported = ", ".join(dict.fromkeys(re.findall(r"[A-Z]\w+(?=\()", example)))
        head = f"from megatron.bridge.training.config import {imported}\n\n\ndef config() -> ConfigContainer:\n"
        return f"{head}    return {example}\n", "config.py"
    ending = next(ending for ending in (".yaml", ".yml", ".json") if ending in framework.endings)
    return example + "\n", f"config{ending}"


def _lint(name: str, example: str) -> list[Finding]:
    text, path = _text_of(name, example)
    return lint_text(text, path, WORLD, name=name)


@pytest.mark.parametrize(("name", "entry"), CHECKS)
def test_a_check_is_well_formed(name: str, entry: Entry) -> None:
    assert re.fullmatch(r"\S+ \S+ \S+\.py(:\d+)?", entry.source), "no source: name, version, file and line"
    keys = [*expression.keys_of(entry.when)]
    assert keys
    assert entry.says
    assert {*re.findall(r"\{([\w.]+)\}", entry.says)} <= {*keys, "world_size"}, (
        "the message names a key that is not read"
    )


def _records(name: str, example: str, world: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Lint an example by the command, in this folder, and return its errors and warnings."""
    text, path = _text_of(name, example)
    Path(path).write_text(text, encoding="utf-8")
    status = main(["lint", path, "--from", name, "--world-size", world, "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    assert status == any(item["severity"] == "error" for item in found)
    # The files that an example names are not there, which is a finding of its own.
    return [item for item in found if item["severity"] != "info" and item["code"] != "FRN205"]


def _is_of(item: Mapping[str, Any], entry: Entry) -> bool:
    message = re.sub(r"\\{[\w\\.]+\\}", ".+", re.escape(entry.says))
    return item["code"] == CODES[entry.kind] and re.fullmatch(message, item["message"]) is not None


@pytest.mark.parametrize(("name", "entry"), CHECKS)
def test_a_check_finds_its_example(
    name: str, entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert entry.bad, "no example that breaks the rule"
    assert entry.good, "no corrected example"
    (found,) = _records(name, entry.bad, entry.world, capsys)
    assert _is_of(found, entry)
    assert entry.source in found["help"]
    assert "None" not in found["message"]
    assert _records(name, entry.good, entry.world, capsys) == []


MEGATRON = "--num-layers 8 --hidden-size 96 --num-attention-heads 8 "
JUDGED = {
    "PAR101": ("megatron", f"{MEGATRON} --tensor-model-parallel-size 3 --num-attention-heads 6", MEGATRON),
    "PAR102": ("megatron", f"{MEGATRON} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2", MEGATRON),
    "PIP101": ("gpt_neox", '{"num_layers": 4, "pipe_parallel_size": 8}', '{"num_layers": 8, "pipe_parallel_size": 8}'),
    "TEN201": ("megatron", f"{MEGATRON} --num-attention-heads 6 --tensor-model-parallel-size 4", MEGATRON),
    "TEN203": ("megatron", f"{MEGATRON} --ffn-hidden-size 90 --tensor-model-parallel-size 4", MEGATRON),
    "BAT101": ("megatron", f"{MEGATRON} --global-batch-size 12", f"{MEGATRON} --global-batch-size 16"),
    "BAT103": ("megatron", f"{MEGATRON} --seq-length 64 --max-position-embeddings 32", MEGATRON),
    "BAT106": ("megatron", f"{MEGATRON} --lr 1e-4 --min-lr 1e-3", f"{MEGATRON} --lr 1e-3 --min-lr 1e-4"),
}
"""Code of a rule of dslpar that holds in other frameworks -> the framework, an example, and the example corrected."""


@pytest.mark.parametrize("code", JUDGED)
def test_a_rule_of_dslpar_judges_other_frameworks(code: str) -> None:
    name, bad, good = JUDGED[code]
    assert code in rules_of(name).judged
    assert [item.code for item in _lint(name, bad) if item.severity == "error"] == [code]
    assert [item.code for item in _lint(name, good) if item.severity == "error"] == []


@pytest.mark.parametrize("name", [file.removesuffix(".txt") for file in FILES if file != "common.txt"])
def test_files_are_of_sources_that_dslpar_imports(name: str) -> None:
    assert name in TABLES


LEGAL = {
    "deepspeed": [
        '{"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}',
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "fp16": {"enabled": false}}',
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}',
        '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}',
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}',
    ],
    "gpt_neox": [
        '{"pipe_parallel_size": 2, "model_parallel_size": 2, "num_layers": 4, "hidden_size": 64,'
        ' "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64,'
        ' "zero_optimization": {"stage": 1}}',
        '{"pipe_parallel_size": 0, "zero_optimization": {"stage": 3}, "fp16": {"enabled": true}}',
        '{"num_layers": 4, "num_unique_layers": 2, "pipe_parallel_size": 1}',
    ],
    "megatron": [
        "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64"
        " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 --bf16 --lr 1e-3",
        "--hidden-size 100 --num-attention-heads 8 --kv-channels 16",
        "--num-layers 10 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 1",
        "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer",
        "--train-iters 10 --lr-warmup-fraction 0.1",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in LEGAL.items() for text in texts])
def test_legal_configs_have_no_findings(name: str, text: str) -> None:
    assert [item.text() for item in _lint(name, text) if item.severity != "info"] == []


PUBLISHED = sorted(path for path in FOREIGN.rglob("*.*") if path.is_file())


@pytest.mark.parametrize("path", PUBLISHED, ids=[path.relative_to(FOREIGN).as_posix() for path in PUBLISHED])
@pytest.mark.parametrize("world_size", [None, 8, 64])
def test_no_false_errors_in_published_configs(path: Path, world_size: int | None) -> None:
    source = read_text(path.read_text(encoding="utf-8"), str(path))
    if source.name not in TABLES:
        return  # it is LiBai's form, which loads as it is
    made, _, found, _ = lint_source(source, world_size)
    errors = [item for item in found if item.severity == "error"]
    if errors:  # published configs are legal, but not on any number of ranks
        assert world_size is not None, [item.text() for item in errors]
        assert not _fits(made.values, world_size), [item.text() for item in errors]
        assert {item.code for item in errors} <= {"PAR101", "PAR102", "BAT101", "FRN201"}
        ours = {entry.source for entry in rules_of(source.name).checks if "world_size" in entry.when}
        assert all(any(place in item.help for place in ours) for item in errors if item.code == "FRN201")


def _fits(values: Mapping[str, Any], world_size: int) -> bool:
    """Return whether the sizes of a converted config divide the ranks, and its batch the replicas."""
    sizes = [values.get(f"parallel.{axis}.size", values.get(f"parallel.{axis}", 1)) for axis in AXES]
    replica = math.prod(size for size in sizes if type(size) is int)
    data = values.get("parallel.data.size", values.get("parallel.data"))
    if world_size % replica or data not in (None, world_size // replica):
        return False
    global_size = values.get("batch.global_size")
    micro = values.get("batch.micro_size", 1) * values.get("batch.accumulation", 1)
    return type(global_size) is not int or global_size % (micro * (world_size // replica)) == 0


AXES = ("pipeline", "tensor", "context")


def test_findings_are_at_the_sources_lines_and_in_its_names() -> None:
    text = (
        '{\n  "train_batch_size": 10,\n  "train_micro_batch_size_per_gpu": 4,\n  "gradient_accumulation_steps": 1\n}\n'
    )
    (found,) = lint_text(text, "ds.json", 8)
    assert (found.location.line, found.location.column, found.location.end_column) == (2, 23, 25)
    assert found.message.startswith("train_batch_size 10 is not train_micro_batch_size_per_gpu 4")


def test_dslpars_rules_use_the_sources_keys() -> None:
    text = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 96 --num-attention-heads 6 \\\n"
    text += "  --micro-batch-size 2 --tensor-model-parallel-size 4 --seq-length 8 --max-position-embeddings 8\n"
    (found,) = (item for item in lint_text(text, "t.sh", 8) if item.severity == "error")
    assert (found.code, found.location.line, found.key) == ("TEN201", 1, "--num-attention-heads")
    assert found.message == "--num-attention-heads 6 is not a multiple of --tensor-model-parallel-size 4"


def test_an_implied_size_is_not_blamed_on_the_author() -> None:
    text = "pipe_parallel_size: 1\nmodel_parallel_size: 3\nnum_layers: 2\nhidden_size: 96\nnum_attention_heads: 12\n"
    text += "activation: swiglu\n"
    assert not [item for item in lint_text(text, "a.yml", 3, name="gpt_neox") if item.code.startswith("TEN")]
    text += "intermediate_size: 600\n"
    (found,) = (item for item in lint_text(text, "a.yml", 3, name="gpt_neox") if item.code.startswith("TEN"))
    assert found.message == "intermediate_size 200 is not a multiple of model_parallel_size 3"


def test_a_value_that_dslpar_adds_is_not_blamed_on_the_author() -> None:
    found = lint_text('{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 3}', "ds.json", 8)
    assert found == []


def test_ignored_keys_have_a_suggestion() -> None:
    (found,) = lint_text('{"train_micro_batch_size_per_gpu": 1, "gradient_cliping": 1.0}', "ds.json")
    assert (found.code, found.severity) == ("FRN204", "warning")
    assert "gradient_clipping" in found.help


def test_keys_that_are_not_judged_are_one_note() -> None:
    (found,) = lint_text('{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}', "ds.json")
    assert (found.code, found.severity) == ("FRN205", "info")
    assert "train_batch_size, train_micro_batch_size_per_gpu" in found.message


def test_names_of_dslpar_become_the_sources() -> None:
    names = {"model.num_heads": "--num-attention-heads", "parallel.tensor.size": "TP"}
    text = "num_heads 3 is not a multiple of y = 2 in mode '1d'"
    assert in_their_names(text, names) == "--num-attention-heads 3 is not a multiple of TP 2"
    assert in_their_names("there is no model", {"model": "base_model"}) == "there is no model"


# Conditions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b == 3 and c > 1", True),
        ("missing > 1 or c == 2", True),  # one operand decides
        ("missing > 1 or c == 3", False),
        ("not (missing > 1)", False),  # unknown stays unknown
        ("c // 0 == 1", False),
        ("c % 2 == 0 and name in ['x', 'y']", True),
        ("missing == None", True),
        ("given(a.b) and not given(missing)", True),
        ("name * 1000000000 == 1", False),
        ("-c < 0 and 1 < c < 3", True),
    ],
)
def test_conditions(text: str, expected: bool) -> None:
    values = {"a.b": 3, "c": 2, "name": "x"}
    assert expression.holds(text, values.get, values.__contains__) is expected


@pytest.mark.parametrize("text", ["f(x)", "x[0]", "__import__('os')", "lambda: 1", "(y := 2)", "given(a, b)", "2 ** 9"])
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(SyntaxError):
        list(expression.keys_of(text))


def test_the_grammar_of_the_files() -> None:
    rules = framework_rules.rules_of("megatron")
    assert "TEN205" not in rules.judged
    assert "BAT101" in rules.judged
    assert framework_rules.rules_of("no such source").checks == ()


_KEYS = sorted({key for case in CHECKS for key in expression.keys_of(case.values[1].when)} - {"world_size"})
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.just("auto"),
    st.lists(st.integers(), max_size=2),
)


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=6), st.sampled_from([None, 1, 7, 8]))
def test_random_values_never_crash(values: dict[str, object], world_size: int | None) -> None:
    tree: dict[str, object] = {}
    for key, value in values.items():
        first, _, rest = key.partition(".")
        inner = tree.get(first)
        if rest and isinstance(inner, dict | None):
            tree[first] = {**(inner or {}), rest.partition(".")[0]: value}
        elif not rest:
            tree.setdefault(first, value)
    text = json.dumps(tree)
    for path, name in (("a.json", "deepspeed"), ("a.yml", "gpt_neox")):
        for item in lint_text(text, path, world_size, name=name):
            assert item.location.path == path


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "concise", "json", "github", "gitlab", "sarif"])
def test_every_format_reports_foreign_files(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true}, "bf16": {"enabled": true}}'
    )
    assert main(["lint", "ds.json", "--format", form]) == 1
    assert "FRN201" in capsys.readouterr().out


def test_a_folder_claims_only_dslpars_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("neox.yml").write_text('{"pipe_parallel_size": 2, "zero_optimization": {"stage": 3}}')
    assert main(["lint", "neox.yml"]) == 1
    assert main(["lint", "neox.yml", "--configs-only"]) == 0
    assert "FRN201" in capsys.readouterr().out


def test_show_converts_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    script += " --max-position-embeddings 64 --micro-batch-size 2 --vocab-size 256 --lr 1e-3 --train-iters 10"
    Path("t.sh").write_text(script + " --tensor-model-parallel-size 2\n")
    assert main(["show", "t.sh", "--world-size", "4"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("t.sh is a config of Megatron-LM, converted in memory")
    assert "data 2 * tensor 2" in printed.out
    assert main(["plan", "t.sh", "--world-size", "4", "--device", "h100-80g"]) == 0
    assert capsys.readouterr().err.startswith("t.sh is a config of Megatron-LM")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.sh"]


def test_a_program_is_linted_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        'import dslpar\n\nif __name__ == "__main__":\n    dslpar.start(dslpar.arguments(config="cfg.py"))\n'
    )
    assert main(["lint", "train.py"]) == 1  # there is no such config
    Path("cfg.py").write_text("batch = dict(micro_size='two')\n")
    capsys.readouterr()
    assert main(["lint", "train.py"]) == 1
    printed = capsys.readouterr().out
    assert "cfg.py:1:25: CFG102" in printed
    assert "train.py:3:1: CFG129 python-program [info]" in printed
    Path("cfg.py").write_text("batch = dict(micro_size=2)\n")
    assert main(["lint", "train.py"]) == 0


def test_show_and_plan_report_at_the_sources_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 96 --num-attention-heads 6 --seq-length 8 \\\n"
    script += "  --max-position-embeddings 8 --micro-batch-size 2 --vocab-size 256 --tensor-model-parallel-size 4\n"
    Path("t.sh").write_text(script)
    for command in (["show"], ["plan", "--device", "h100-80g"]):
        assert main([*command, "t.sh", "--world-size", "8"]) == 1
        printed = capsys.readouterr().err
        assert "t.sh:1:80: TEN201" in printed
        assert printed.count("TEN201") == 1
        assert "--num-attention-heads 6 is not a multiple of --tensor-model-parallel-size 4" in printed
        assert "t.sh.py" not in printed


def test_comments_of_deepspeeds_json_are_no_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = '{\n  "train_batch_size": 32, // samples of a step\n  "zero_optimization": {"stage": %d}\n}\n'
    Path("ds.json").write_text(text % 2)
    assert main(["lint", "ds.json"]) == 0
    assert "no findings" in capsys.readouterr().out
    Path("ds.json").write_text(text % 4)
    assert main(["lint", "ds.json"]) == 1
    assert "ds.json:3:34: FRN201" in capsys.readouterr().out
    main(["show", "ds.json", "--world-size", "2"])
    assert "ds.json is a config of DeepSpeed" in capsys.readouterr().err
    Path("ds.json").write_text('{"model": {"type": "GPT"}, // ours\n "train": 1}\n')
    assert main(["lint", "ds.json"]) == 1
    assert "CFG001" in capsys.readouterr().out, "comments are a mistake in dslpar's own JSON"


def test_show_says_what_it_did_not_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    script += " --max-position-embeddings 64 --micro-batch-size 2 --lr 1e-3 --train-iters 10 --qk-layernorm"
    Path("t.sh").write_text(f"{script}\n")
    for command in (["show"], ["plan", "--device", "h100-80g"]):
        main([*command, "t.sh", "--world-size", "4"])
        note = capsys.readouterr().err.splitlines()[0]
        assert "; not converted: --qk-layernorm; to be chosen: model.vocab_size" in note


def test_a_model_that_is_not_converted_is_found_at_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "per_device_train_batch_size: 1\nmax_steps: 2\nmodel_name_or_path: org/tiny\nlora_r: 4\nuse_peft: %s\n"
    for switch in ("false", "true"):  # without a model, and with one that has adapters only
        Path("a.yaml").write_text(text % switch)
        assert main(["show", "a.yaml", "--world-size", "2"]) == 1
        printed = capsys.readouterr()
        assert "a.yaml:3:1: CFG10" in printed.out + printed.err
        assert "model_name_or_path is not converted: download 'org/tiny'" in printed.out + printed.err
        assert "give --model FILE" in printed.out + printed.err


def test_a_json_without_a_key_of_deepspeed_is_not_deepspeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_text('{"name": "x", "version": "1"}', "package.json").name == ""
    assert read_text('{"zero_optimization": {"stage": 1}}', "a.json").name == "deepspeed"
    Path("package.json").write_text('{"name": "x", "version": "1"}')
    with pytest.raises(SystemExit):
        main(["import", "package.json"])
    assert "cannot detect the framework of package.json" in capsys.readouterr().err
    (found,) = lint_text('{"name": "x"}', "a.hjson")
    assert (found.code, found.severity) == ("FRN205", "info")


def test_a_missing_json_of_deepspeed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "per_device_train_batch_size: 1\nnum_train_epochs: 1\nmodel_name_or_path: m\ndeepspeed: ds.json\n"
    Path("a.yaml").write_text(text)
    linted = lint_source(read_text(text, "a.yaml"))
    (found,) = (item for item in linted.findings if item.severity == "warning")
    assert (found.location.line, found.message) == (4, "file 'ds.json' is missing: what it sets is not judged")
    assert {"zero", "precision"} <= linted.config.unknown
    main(["show", "a.yaml", "--world-size", "4"])
    assert capsys.readouterr().err.splitlines()[0].endswith("; missing: ds.json")


def test_toml_is_linted_shown_and_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (FOREIGN / "torchtitan/llama3_8b.toml").read_text()
    Path("l.toml").write_text(text)
    assert main(["lint", "l.toml", "--world-size", "8"]) == 0
    assert main(["show", "l.toml", "--world-size", "8"]) == 0
    assert main(["plan", "l.toml", "--world-size", "8", "--device", "h100-80g"]) == 0
    assert capsys.readouterr().err.count("l.toml is a config of torchtitan") == 2
    Path("l.toml").write_text(re.sub(r"tensor_parallel_degree = \d+", "tensor_parallel_degree = 3", text))
    for command in (["lint"], ["show"], ["plan", "--device", "h100-80g"]):
        assert main([*command, "l.toml", "--world-size", "8"]) == 1
        printed = capsys.readouterr()
        line = next(n for n, each in enumerate(text.splitlines(), 1) if each.startswith("tensor_parallel_degree"))
        assert f"l.toml:{line}:" in printed.out + printed.err
        assert "does not divide WORLD_SIZE(8)" in printed.out + printed.err


HF = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 256}
HF |= {"num_hidden_layers": 4, "num_attention_heads": 6, "vocab_size": 1000, "max_position_embeddings": 128}


def test_the_model_of_a_hugging_face_folder_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps(HF))
    Path("t.sh").write_text(
        "megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 4 --pipeline_model_parallel_size 8\n"
    )
    assert main(["lint", "t.sh"]) == 0
    capsys.readouterr()
    for name in ("hf", "hf/config.json"):
        assert main(["lint", "t.sh", "--model", name, "--format", "json"]) == 1
        found = {item["code"]: item for item in json.loads(capsys.readouterr().out)}
        assert "6 is not a multiple of --tensor_model_parallel_size 4" in found["TEN201"]["message"]
        assert "8 stages, but the model has 4 layers" in found["PIP101"]["message"]
        assert {(found[code]["path"], found[code]["line"]) for code in ("TEN201", "PIP101")} == {("t.sh", 1)}
        assert found["TEN201"]["key"] == "--tensor_model_parallel_size"
    with pytest.raises(SystemExit):
        main(["lint", "t.sh", "--model", str(tmp_path)])
    assert "cannot read" in capsys.readouterr().err
    Path("hf/config.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["lint", "t.sh", "--model", "hf"])
    assert "names no class" in capsys.readouterr().err


def test_a_forecast_of_memory_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("# device: a100-40g\nhost slots=1\n")
    Path("t.sh").write_text(
        "torchrun pretrain_gpt.py --num-layers 64 --hidden-size 8192 --num-attention-heads 64 --seq-length 2048"
        " --max-position-embeddings 2048 --micro-batch-size 2 --vocab-size 50000 --lr 1e-3 --train-iters 10 --bf16\n"
    )
    assert main(["lint", "t.sh", "--hostfile", "hosts", "--format", "json"]) == 0
    (found,) = (item for item in json.loads(capsys.readouterr().out) if item["code"] == "FIT101")
    assert (found["severity"], found["path"]) == ("info", "t.sh")
    assert "assumed: model.type='GPT'" in found["help"]


# Several files --------------------------------------------------------------------------------------------------------

NEOX = '{"pipe-parallel-size": 1, "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "save": "a"}\n'


def test_neox_merges_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yml").write_text(NEOX)
    Path("setup.yml").write_text('{"vocab-file": "v",\n "num_unique_layers": 3}\n')
    assert main(["lint", "small.yml"]) == 0
    capsys.readouterr()
    assert main(["lint", "setup.yml", "small.yml", "--format", "concise"]) == 1
    printed = capsys.readouterr().out
    assert "setup.yml:2:23: FRN201" in printed
    assert "num_layers 4 is not a multiple of num_unique_layers 3" in printed
    assert "CFG" not in printed
    Path("setup.yml").write_text('{"vocab-file": "v",\n "save": "b"}\n')
    assert main(["lint", "small.yml", "setup.yml", "--format", "concise"]) == 1
    assert "setup.yml:2:2: FRN201 refused-by-its-framework: save is in small.yml, too" in capsys.readouterr().out


def test_two_runs_are_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yml").write_text(NEOX)
    Path("large.yml").write_text(NEOX)
    assert main(["lint", "small.yml", "large.yml"]) == 0
    assert main(["lint", "small.yml", "large.yml", "--from", "gpt_neox"]) == 1
    assert "num-layers is in small.yml, too" in capsys.readouterr().out


def test_import_takes_the_files_that_neox_merges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yml").write_text(NEOX)
    Path("setup.yml").write_text('{"train_micro_batch_size_per_gpu": 3}\n')
    main(["import", "small.yml", "setup.yml"])
    printed = capsys.readouterr()
    assert "micro_size=3" in printed.out
    assert "setup.yml:1: train_micro_batch_size_per_gpu -> batch.micro_size" in printed.err
    Path("setup.yml").write_text('{"save": "b"}\n')
    with pytest.raises(SystemExit) as stopped:
        main(["import", "small.yml", "setup.yml"])
    assert stopped.value.code == 2
    assert "save is in small.yml, too" in capsys.readouterr().err
    Path("ds.json").write_text('{"train_batch_size": 8}')
    with pytest.raises(SystemExit):
        main(["import", "ds.json", "setup.yml"])
    assert "DeepSpeed reads one config, not 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "rule_holds"), [("--merge_lora false", True), ("", False), ("--save_safetensors false", True)]
)
def test_false_is_given(words: str, rule_holds: bool) -> None:
    found = lint_text(f"megatron sft --tuner_type lora_llm --no_save_optim true {words}\n", "t.sh", name="ms_swift")
    assert any("merge_lora must be True" in item.message for item in found) is rule_holds


def test_what_an_override_leaves_out_is_unknown() -> None:
    text = "train: {train_samples: 100}\nmodel: {num_layers: 8, expert_model_parallel_size: 2}\n"
    assert [item for item in lint_text(text, "o.yaml", 8, name="megatron_bridge") if item.severity == "error"] == []
