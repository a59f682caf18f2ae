"""Each value of a config and its reason: locations, the Job's numbers, and every accepted form of a key.

The leaves of every shipped config are walked, in the world of its launch command and in none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dslpar.cli import main as cli_main
from dslpar.cluster.hostfile import parse
from dslpar.core.errors import COMMAND_LINE, Location
from dslpar.language.load import Config
from dslpar.language.overrides import parse_value
from dslpar.language.tree import Reference
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.linter.registry import RULES
from dslpar.linter.rule import Rule
from dslpar.linter.rules.hosts import RULES as HOST_RULES
from dslpar.provenance import text as provenance_text
from dslpar.provenance.deepspeed import deepspeed_values, flat
from dslpar.provenance.query import Answers
from dslpar.provenance.subject import Subject
from dslpar.provenance.values import Value, values_of
from dslpar.reporting import run_dir
from tests.support.paths import ROOT
from tests.support.rule_pages import sections
from tests.unit.test_repository import heavy_imports

CONFIGS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "configs").rglob("*.py")
    if "common" not in path.relative_to(ROOT).parts
)
MODEL = "model = dict(type='GPT', num_layers=4, hidden_size=96, num_heads=24, vocab_size=257, max_seq_len=96)\n"


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def world_of(config: str) -> int:
    """Return the number of ranks in the launch command of a config's first comment."""
    found = re.search(r"deepspeed (?:--num_gpus (\d+)|--hostfile (\S+))", (ROOT / config).read_text())
    assert found, config
    num_gpus, hosts = found.groups()
    return int(num_gpus) if num_gpus else parse((ROOT / hosts).read_text(), hosts).world_size


def subject_of(text: str, world: int | None = 8, overrides: list[str] | None = None) -> Subject:
    return Subject(check.load_text(text, "cfg.py", overrides or []), world)


def answer(text: str, key: str, world: int | None = 8, overrides: list[str] | None = None) -> Value:
    subject = subject_of(text, world, overrides)
    (value,) = Answers(subject, values_of(subject)).of(key)
    return value


def marked(config: Config, place: Location) -> str:
    """Return the characters at a place."""
    lines = config.sources[place.path].split("\n")[place.line - 1 : place.end_line]
    lines[-1] = lines[-1][: place.end_column - 1]
    lines[0] = lines[0][place.column - 1 :]
    return "\n".join(lines)


# Every leaf of every shipped config -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", ["its", "none"])
@pytest.mark.parametrize("path", CONFIGS)
def test_every_leaf_is_explained(path: str, world: str) -> None:
    """Each has one answer under its own name, and under its author's name for it."""
    subject = Subject(check.load(path), world_of(path) if world == "its" else None)
    values = values_of(subject)
    answers = Answers(subject, values)
    for key, value in values.items():
        assert key == "deepspeed" or answers.of(key) == [value]  # an empty section has DeepSpeed's dict as its answer
        assert value.how in ("written", "overridden", "inferred", "default", "unknown")
        assert bool(value.steps) == (value.how in ("written", "overridden")), key
        assert value.steps or value.why, key
        assert value.why or value.source_key, key
        assert set(value.sources) <= set(values), key
        assert value.help, key


@pytest.mark.parametrize("path", CONFIGS)
def test_a_place_is_where_the_value_stands(path: str) -> None:
    """For literals, the characters there are the value."""
    config = check.load(path, ["train.seed=77", "optimizer.lr=1e-3"])
    checked = 0
    for value in values_of(Subject(config, world_of(path))).values():
        if not value.steps:
            continue
        said = marked(config, value.steps[0].location)
        read = parse_value(said, 1)[0]
        if isinstance(value.value, str) and isinstance(read, str):
            name = value.value.rpartition(".")[2]  # imported by it, or the whole of it
            assert read == value.value or said.startswith((f"LazyCall({value.value})(", f"LazyCall({name})(")), value
            checked += 1
        elif not isinstance(read, str):
            assert read == value.value, value
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("path", CONFIGS)
def test_values_are_the_jobs(path: str) -> None:
    job = check.resolve(path, world_of(path))
    values = values_of(Subject(check.load(path), world_of(path)))
    for key, number in numbers_of(job).items():
        if key in values and values[key].how != "unknown":
            assert values[key].value == number, key
    assert not [
        key for key, value in values.items() if value.how == "unknown" and not key.startswith("parallel.pipeline.")
    ]


def numbers_of(job: Job) -> dict[str, Any]:
    cuboid = job.mesh.tensor
    return {
        "parallel.data.size": job.mesh.data,
        "parallel.pipeline.size": job.mesh.pipe,
        "parallel.tensor.size": cuboid.beside_context,
        "parallel.tensor.shape": cuboid.shape if cuboid.mode else None,
        "parallel.tensor.residual": cuboid.residual,
        "parallel.tensor.keep": cuboid.keep,
        "parallel.order": job.mesh.order,
        "parallel.pipeline.stage_ids": job.stages.actual_ids,
        "parallel.pipeline.counts": job.stages.counts if job.mesh.pipe > 1 else None,
        "train.dist.auto_pipeline_stage_id": job.stages.auto_ids,
        "train.dist.actual_pipeline_stage_id": job.stages.actual_ids,
        "batch.global_size": job.batch.global_size,
        "batch.micro_size": job.batch.micro_size,
        "batch.accumulation": job.batch.accumulation,
        "data.seq_len": job.seq_len,
        "train.output_dir": job.output_dir,
    }


@pytest.mark.parametrize("path", CONFIGS)
def test_numbers_in_sentences_come_out(path: str) -> None:
    """`16 / (accumulation 4 * data 2)` is computed as written, and gives the value."""
    checked = 0
    for value in values_of(Subject(check.load(path), world_of(path))).values():
        sum_ = re.sub(r"[a-z_]+ ?(?=\d)|\branks\b", "", value.why)
        if value.how == "inferred" and re.fullmatch(r"[\d ()*/]+", sum_) and set(sum_) & {"*", "/"}:
            assert eval(sum_) == value.value, value
            checked += 1
    assert checked >= 1


@pytest.mark.parametrize("path", CONFIGS)
def test_all_of_deepspeeds_dict_is_explained(path: str) -> None:
    job = check.resolve(path, world_of(path))
    subject = Subject(check.load(path), world_of(path))
    values = values_of(subject)
    found = deepspeed_values(subject, values)
    assert {key.removeprefix("deepspeed."): value.value for key, value in found.items()} == dict(flat(ds_config(job)))
    for value in found.values():
        same = values.get(value.why)
        if same is not None and same.key != "precision.dtype":  # a value without its own reason repeats its source's
            assert _listed(same.value) == value.value, value


def test_deepspeed_s_sequence_parallel_keys_are_explained() -> None:
    text = MODEL + "parallel = dict(context=2)\nzero = 1\n"
    value = answer(text, "deepspeed.seq_parallel_communication_data_type", world=2)
    assert (value.value, value.how) == ("fp32", "inferred")
    assert "parallel.context.size" in value.sources
    assert answer(text + "precision = 'fp16'\n", value.key, world=2).value == "fp16"


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value.name if isinstance(value, Reference) else value


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in HOST_RULES], ids=lambda rule: rule.code)
def test_configs_with_mistakes_are_explained(rule: Rule) -> None:
    """For each rule's example, every known value is explained, and unknown ones have the reason."""
    example = sections(rule)["Example"]
    text = example if re.search(r"^model\b", example, re.MULTILINE) else MODEL + example
    subject = subject_of(text, 8, re.findall(r"^# override: (.*)$", text, re.MULTILINE))
    values = values_of(subject)
    answers = Answers(subject, values)
    assert provenance_text.listing(subject, values).count("\n") == len(values) + 1
    for value in [*values.values(), *answers.deepspeed.values()]:
        assert answers.of(value.key)
        assert provenance_text.explanation(subject, value, values).startswith(value.key)
        assert value.how != "unknown" or value.why
    assert bool(answers.deepspeed) == subject.sound


# Why --------------------------------------------------------------------------------------------------------------

TWO = "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\n"
BATCH = "batch = dict(global_size=16, accumulation=2)\n"
LIBAI = "train = dict(dist=dict(tensor_parallel_size=2, pipeline_parallel_size=2))\n"
WHY = {
    "data": (TWO, "parallel.data", 2, "inferred", "8 ranks / (pipeline 2 * tensor 2)"),
    "micro": (TWO + BATCH, "batch.micro_size", 4, "inferred", "global_size 16 / (accumulation 2 * data 2)"),
    "global": (TWO, "batch.global_size", 2, "inferred", "micro_size 1 * accumulation 1 * data 2"),
    "sequence": (TWO, "data.seq_len", 96, "inferred", "the model's max_seq_len"),
    "cut": (
        TWO,
        "parallel.pipeline.stage_ids",
        (0, 0, 1, 1),
        "inferred",
        "method 'cost' divides 4 layers over 2 stages",
    ),
    "cut into chunks": (
        TWO + BATCH + "schedule = 'interleaved'\n",
        "parallel.pipeline.stage_ids",
        (0, 1, 0, 1),
        "inferred",
        "method 'cost' divides 4 layers over 4 stages",
    ),
    "LiBai's cut": (
        LIBAI,
        "parallel.pipeline.counts",
        (2, 2),
        "inferred",
        "method 'libai' divides 4 layers over 2 stages",
    ),
    "LiBai's own cut, beside one by hand": (
        LIBAI.replace("))", ", custom_pipeline_stage_id=[0, 1, 1, 1]))"),
        "train.dist.auto_pipeline_stage_id",
        (0, 0, 1, 1),
        "inferred",
        "method 'libai' divides 4 layers over 2 stages; recomputed",
    ),
    "sizes that do not fit": (
        "batch = dict(global_size=20, accumulation=2)\n",
        "batch.micro_size",
        None,
        "unknown",
        "unknown until the errors are corrected",
    ),
    "LiBai's mode": (LIBAI, "parallel.tensor.mode", "1d", "inferred", "names no mode"),
    "LiBai's name of dslpar's": (TWO, "train.dist.tensor_parallel_size", 2, "written", ""),
    "dslpar's name of LiBai's": (LIBAI, "parallel.tensor.size", 2, "written", ""),
    "ColossalAI's name": (TWO + BATCH, "schedule.num_microbatches", 2, "written", ""),
    "LiBai's name of the model's": ("", "model.cfg.hidden_layers", 4, "written", ""),
    "alias": ("", "model.num_attention_heads", 24, "written", ""),
    "feed-forward": ("", "model.ffn_hidden_size", 384, "inferred", "4 * hidden_size 96"),
    "folder": ("", "train.output_dir", "outputs/cfg", "inferred", "the name of the config, cfg.py"),
    "of a mode": (TWO, "parallel.tensor.residual", "replicated", "inferred", "the default of mode '1d'"),
    "default": ("", "train.seed", 1234, "default", "the default"),
    "default with a reason": ("", "train.save_interval", None, "default", "left out: the last step alone; 0: never"),
    "no pipeline": ("", "parallel.pipeline", 1, "default", "one stage"),
    "a key of another type": ("", "optimizer.momentum", None, "default", "type='SGD'; here the type is 'AdamW'"),
    "a key of a section that is off": ("", "monitor.csv.job_name", None, "default", "there is no monitor.csv here"),
    "DeepSpeed's batch": (TWO + BATCH, "deepspeed.train_batch_size", 16, "inferred", "batch.global_size"),
    "DeepSpeed's clipping": ("", "deepspeed.gradient_clipping", 0.0, "inferred", "clipping is off"),
    "DeepSpeed's default": (
        "",
        "deepspeed.zero_optimization.reduce_bucket_size",
        500_000_000,
        "default",
        "DeepSpeed's own default",
    ),
    "DeepSpeed's key, written": (
        "zero = dict(stage=1, reduce_bucket_size=7)\n",
        "deepspeed.zero_optimization.reduce_bucket_size",
        7,
        "inferred",
        "zero.reduce_bucket_size",
    ),
    "DeepSpeed's key by dslpar's name": ("", "zero.overlap_comm", None, "default", "DeepSpeed's own default"),
    "dslpar's own choice": (TWO, "deepspeed.pipeline.pipe_partitioned", False, "inferred", "hold equal activations"),
    "raw": ("deepspeed = dict(wall_clock_breakdown=True)\n", "deepspeed.wall_clock_breakdown", True, "written", ""),
    "shorthand": ("zero = dict(stage=2, offload_optimizer='cpu')\n", "zero.offload_optimizer", "cpu", "written", ""),
    "the least": (
        "parallel = dict(tensor=dict(size=4, mode='2d'))\n",
        "batch.micro_size",
        2,
        "inferred",
        "the smallest number divisible by x = 2",
    ),
}


@pytest.mark.parametrize("case", WHY)
def test_why(case: str) -> None:
    text, key, expected, how, why = WHY[case]
    value = answer(MODEL + text, key)
    assert (value.value, value.how) == (expected, how)
    assert why in value.why


def test_the_vocabulary_says_what_it_is_padded_to() -> None:
    value = answer(MODEL + "parallel = dict(tensor=dict(size=4, mode='1d'))\n", "model.vocab_size")
    assert value.notes == ("padded to 260, a multiple of y * q = 4",)
    assert answer(MODEL, "model.vocab_size").notes == ()


def test_an_override_tells_what_the_file_says() -> None:
    text = MODEL + TWO + "train = dict(steps=30, eval_interval=5)\n"
    value = answer(text, "train.steps", overrides=["train.steps=10"])
    assert (value.value, value.how) == (10, "overridden")
    assert value.steps[0].location.path == COMMAND_LINE
    assert value.over == (30, Location("cfg.py", 3, 20, 3, 22))
    shorthand = answer(text, "parallel.pipeline.size", overrides=["parallel.pipeline.size=4"])
    assert (shorthand.value, shorthand.how, shorthand.over) == (4, "overridden", (2, Location("cfg.py", 2, 26, 2, 27)))
    gone = answer(text, "train.eval_interval", overrides=["~train.eval_interval"])
    assert (gone.value, gone.how, gone.over) == (None, "default", (5, Location("cfg.py", 3, 38, 3, 39)))
    fresh = answer(text, "train.log_interval", overrides=["train.log_interval=3"])
    assert (fresh.value, fresh.how, fresh.over) == (3, "overridden", None)


def test_the_way_through_names_and_imports() -> None:
    subject = Subject(check.load("configs/libai/tensor_pipeline.py"), 8)
    (value,) = Answers(subject, values_of(subject)).of("train.dist.pipeline_num_layers")
    assert [step.what.partition(" to ")[0] for step in value.steps] == ["written", "imported", "given"]
    shown = [(step.location.path.rpartition("/")[2], marked(subject.config, step.location)) for step in value.steps]
    assert shown == [
        ("gpt.py", "24"),
        ("tensor_pipeline.py", "from ..common.models.gpt import pretrain_model as model"),
        ("tensor_pipeline.py", "pipeline_num_layers"),
    ]


def test_without_a_world_what_depends_on_it_says_so() -> None:
    for key in ("parallel.data", "batch.micro_size", "deepspeed.train_micro_batch_size_per_gpu"):
        value = answer(MODEL + TWO + BATCH, key, world=None)
        assert (value.how, value.value) == ("unknown", None)
        assert "--world-size" in value.why
    assert answer(MODEL + TWO, "parallel.pipeline.stage_ids", world=None).value == (0, 0, 1, 1)
    assert answer(MODEL + TWO, "deepspeed.optimizer.params.lr", world=None).value == 3e-4


# The command ------------------------------------------------------------------------------------------------------


def test_listing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["config", "configs/gpt_3d.py", "--world-size", "8", "train.steps=50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "configs/gpt_3d.py: 8 ranks"
    cells = {line.split()[0]: re.split(r"  +", line) for line in lines[1:]}
    assert cells["parallel.data.size"][1:] == ["2", "inferred", "8 ranks / (pipeline 2 * tensor 2)"]
    assert cells["train.steps"][2] == "overridden"
    assert cells["train.steps"][3] == "<command line>:1:13, the file says 100 at configs/gpt_3d.py:9:20"


def test_explain_of_the_issue(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["config", "configs/gpt_3d.py", "--world-size", "8", "--explain", "parallel.data"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "parallel.data.size = 2 (inferred)",
        "  8 ranks / (pipeline 2 * tensor 2)",
        "    parallel.pipeline.size = 2, written: configs/gpt_3d.py:3:26 (parallel.pipeline)",
        "    parallel.tensor.size = 2, written: configs/gpt_3d.py:3:46, mode '1d': x 1 * y 2 * z 1",
        "  help: Replicas; must equal world / (pipeline * tensor). Left out: that number.",
    ]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["config", "configs/gpt_3d.py", "--world-size", "8", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    values = {each["key"]: each for each in shown["values"]}
    assert shown["world_size"] == 8
    assert values["batch.micro_size"]["follows_from"] == [
        "batch.global_size",
        "batch.accumulation",
        "parallel.data.size",
    ]
    assert values["optimizer.lr"]["places"][0]["line"] == 5


@pytest.mark.parametrize("path", CONFIGS)
def test_yaml_is_a_config(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It loads as the same job, and has the contents of a run's config.yaml and the defaults."""
    world = world_of(path)
    assert cli_main.main(["config", path, "--world-size", str(world), "--format", "yaml"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(text)
    job, again = check.resolve(path, world), check.resolve(str(tmp_path / "again.yaml"), world)
    assert (again.mesh, again.batch, again.stages) == (job.mesh, job.batch, job.stages)
    held, of_a_run = yaml.safe_load(text), yaml.safe_load(run_dir.config_yaml(job, check.load(path)))
    assert held["resolved"].pop("defaults")["data.eval_fraction"] == 0.05
    assert held == of_a_run


def test_yaml_without_a_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["config", "configs/gpt_3d.py", "--format", "yaml", "train.steps=7"]) == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    assert check.resolve(str(tmp_path / "again.yaml"), 8).spec.train.steps == 7


def test_sizes_are_not_known_where_the_other_form_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train.dist` may have set them: saying that they are 1 would be a guess."""
    (tmp_path / "c.py").write_text(MODEL + "train = dict(dist=3)\n")
    assert cli_main.main(["config", str(tmp_path / "c.py"), "--format", "json"]) == 1
    ways = {value["key"]: value["how"] for value in json.loads(capsys.readouterr().out)["values"]}
    assert ways["parallel.pipeline.size"] == ways["parallel.tensor.size"] == "unknown"


def test_a_config_with_errors_explains_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["config", "configs/gpt_3d.py", "--world-size", "7", "optimizer.lr='x'", "--explain"]
    assert cli_main.main([*argv, "train.steps", "--explain", "parallel.data", "--explain", "optimizer.lr"]) == 1
    captured = capsys.readouterr()
    assert "train.steps = 100 (written)" in captured.out
    assert "parallel.data.size is not known\n  unknown until the errors are corrected" in captured.out
    assert "optimizer.lr is not known\n" in captured.out
    assert "PAR101" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "configs/gpt_3d.py"],
        ["config", "--reference"],
        ["diff", "configs/gpt_3d.py", "configs/gpt_3d.py"],
        ["explain"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    assert heavy_imports("-m", "dslpar.cli", *arguments) == set()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["configs/gpt_3d.py", "--explain", "train.stps"], "did you mean 'train.steps'?"),
        (
            ["configs/gpt_3d.py", "--explain", "deepspeed.train_batch_sise"],
            "did you mean 'deepspeed.train_batch_size'?",
        ),
        (["configs/gpt_3d.py", "--explain", "nothing_at_all"], "dslpar config --reference lists the keys"),
        (["configs/gpt_3d.py", "--format", "markdown"], "values has the formats text, json, yaml"),
        (["--reference", "--explain", "train"], "--reference takes no config"),
        (["--reference", "train.stps"], "did you mean 'train.steps'?"),
        ([], "no config file"),
    ],
)
def test_a_wrong_command_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli_main.main(["config", *argv])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_length_of_a_sample_is_what_the_folder_s_config_says(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    text = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 96}'
    (tmp_path / "llama" / "config.json").write_text(text)
    path = tmp_path / "cfg.py"
    path.write_text("model = dict(type='transformers.LlamaForCausalLM', pretrained='llama')\n")
    value = values_of(Subject(check.load(str(path)), 1))["data.seq_len"]
    assert (value.value, value.sources) == (96, ("model.pretrained",))
    assert value.why == "max_position_embeddings of the folder's config.json"
