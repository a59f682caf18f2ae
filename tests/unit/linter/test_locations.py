"""Locations: each finding is at the wrong value, through imports, variables, aliases and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.core.errors import COMMAND_LINE
from dslpar.linter.check import lint
from tests.support.lint import BATCH, MODEL, codes, findings, marked

# layout, code, what the caret marks
PLACES = [
    ("parallel = dict(pipeline=0)", "CFG103", "0"),
    ("parallel = dict(pipeline=2.0)", "CFG102", "2.0"),
    ("parallel = dict(pipeline=True)", "CFG102", "True"),
    ("parallel = dict(pipline=2)", "CFG101", "pipline"),
    ("parallel = 3", "CFG102", "3"),
    ("parallel = dict(tensor=dict(mode='1d'))", "CFG104", "dict(mode='1d')"),
    ("parallel = dict(tensor=dict(size=4, mode='1D'))", "TEN102", "'1D'"),
    ("parallel = dict(tensor=4)", "TEN101", "4"),
    ("parallel = dict(tensor=dict(size=6, mode='3d'))", "TEN103", "6"),
    ("parallel = dict(tensor=dict(size=8, mode='2.5d', depth=3))", "TEN106", "3"),
    ("parallel = dict(tensor=dict(size=8, mode='2.5d', kwargs=dict(depth=3)))", "TEN106", "3"),
    ("parallel = dict(tensor=dict(size=4, mode='1d', depth=2))", "TEN108", "2"),
    ("parallel = dict(tensor=dict(size=4, mode='cuboid'))", "TEN107", "'cuboid'"),
    ("parallel = dict(data=3, pipeline=2)", "PAR103", "3"),
    ("parallel = dict(pipeline=2, tensor=dict(size=8, mode='1d'))", "PAR102", "8"),
    ("parallel = dict(pipeline=3)", "PAR101", "3"),
    ("parallel = dict(order=('tensor', 'data', 'pipe'))", "CFG103", "('tensor', 'data', 'pipe')"),
    ("train = dict(dist=dict(tensor_parallel_size=3))", "PAR101", "3"),
    ("train = dict(dist=dict(data_parallel_size=3))", "PAR103", "3"),
    ("train = dict(dist=dict(pipeline_parallel_size=2, pipeline_num_layers=6))", "PIP108", "6"),
    ("train = dict(dist=dict(pipeline_parallel_size=2, custom_pipeline_stage_id=[0]*6+[2]*2))", "PIP104", "2"),
    ("parallel = dict(pipeline=dict(size=2, stage_ids=[0, 0, 0, 0, 1, 1, 1, 7]))", "PIP104", "7"),
    ("parallel = dict(pipeline=dict(size=2, stage_ids=[0, 0, 0, 0, 1, 1, 0, 1]))", "PIP103", "0"),
    ("parallel = dict(pipeline=dict(size=2, counts=[4, 3]))", "PIP107", "[4, 3]"),
    ("parallel = dict(pipeline=dict(size=2, counts=[8]))", "PIP107", "[8]"),
    ("parallel = dict(pipeline=dict(size=2, counts=[0, 8]))", "PIP105", "[0, 8]"),
    ("parallel = dict(pipeline=dict(size=2, method='type:Nothing'))", "PIP109", "'type:Nothing'"),
    ("parallel = dict(pipeline=dict(size=2, method='type:('))", "PIP109", "'type:('"),
    ("optimizer = dict(type='AdmaW')", "CFG108", "'AdmaW'"),
    ("optimizer = dict(lr=-1)", "CFG103", "-1"),
    ("lr_scheduler = dict(type='cosin')", "CFG108", "'cosin'"),
    ("zero = 2\nparallel = dict(pipeline=2)", "ZER101", "2"),
    ("zero = dict(stage=1, reduce_bucket_sise=5)", "CFG101", "reduce_bucket_sise"),
    ("precision = 'bf16'", "PRE101", "'bf16'"),
    ("zero = dict(stage=1, overlap_comm='x')", "CFG102", "'x'"),
    ("zero = dict(stage=1, reduce_bucket_size=-1)", "CFG103", "-1"),
    ("precision = dict(dtype='fp16', loss_scale='x')\nzero = 1", "CFG102", "'x'"),
    ("precision = dict(dtype='fp16', loss_scal=1)\nzero = 1", "CFG101", "loss_scal"),
    ("data = dict(seq_len=97)", "BAT103", "97"),
    ("train = dict(step=10)", "CFG101", "step"),
    ("train = dict(save_interval=-1)", "CFG103", "-1"),
    ("checkpoint = dict(kep=3)", "CFG101", "kep"),
    ("zero = dict(stage=1, offload_optimizer=dict(devise='cpu'))", "CFG101", "devise"),
    ("deepspeed = dict(zero_optimisation=dict(stage=1))", "DSC101", "zero_optimisation"),
    ("deepspeed = dict(csv_monitor=dict(enabled=True))", "DSC102", "csv_monitor"),
    ("deepspeed = dict(comet=dict(enabled=True))", "DSC104", "comet"),
    ("zero = dict(stage=2, offload_optimizer='nvme')", "CFG108", "'nvme'"),
    ("zero = dict(stage=2, offload_param='cpu')", "ZER104", "'cpu'"),
    ("zero = dict(stage=1, offload_optimizer=dict(pin_memory=True))", "CFG104", "dict(pin_memory=True)"),
    ("monitor = dict(wandb=dict(projct='x'))", "CFG101", "projct"),
    ("monitor = dict(csv='yes')", "CFG102", "'yes'"),
    ("activation_checkpoint = 0", "CFG103", "0"),
    ("activation_checkpoint = 9", "PERF102", "9"),
    ("schedule = dict(num_chunks=2)", "PIP112", "2"),
    ("schedule = dict(num_microbatches=3)\nbatch = dict(accumulation=2)", "BAT107", "3"),
    ("batch = dict(global_size=12)\nschedule = dict(num_microbatches=4)", "BAT101", "12"),
    ("gradient_handler = [dict(type='a.B'), dict(type='MoeGradientHandler')]", "CFG108", "'MoeGradientHandler'"),
    ("gradient_handler = dict(type='a.B')\nzero = 1", "ZER106", "dict(type='a.B')"),
    ("optimizer = dict(type='Lamb')\nzero = 1", "ZER103", "dict(type='Lamb')"),
    ("optimizer = dict(type='a.B')\nparallel = dict(tensor=dict(size=2, mode='1d'))", "ZER103", "dict(type='a.B')"),
    ("optimizer = dict(type='RMSprop', alhpa=0.9)", "CFG101", "alhpa"),
    ("optimizer = dict(type='RMSprop', alpha=-1)", "CFG103", "-1"),
    ("optimizer = dict(type='LBFGS')", "CFG108", "'LBFGS'"),
    ("lr_scheduler = dict(type='WarmupLR', warmup_num_steps=101)", "BAT105", "101"),
    ("lr_scheduler = dict(type='cosine', min_lr=1e-5, decay_steps=101)", "BAT126", "101"),
    ("lr_scheduler = dict(type='linear', decay_steps=99)", "BAT126", "99"),
    ("lr_scheduler = dict(type='linear', warmup_steps=9, decay_steps=9)", "BAT127", "9"),
    ("lr_scheduler = dict(type='StepLR')", "CFG104", "dict(type='StepLR')"),
    ("lr_scheduler = dict(type='StepLR', step_size=1.5)", "CFG102", "1.5"),
    ("lr_scheduler = dict(type='LambdaLR', lr_lambda=1)", "CFG108", "'LambdaLR'"),
    ("paralel = dict(pipeline=2)", "CFG105", "paralel"),
    ("batch = dict(global_size=12, micro_size=16)", "BAT101", "12"),
]


@pytest.mark.parametrize(("layout", "code", "mark"), PLACES, ids=[f"{code}-{layout}" for layout, code, _ in PLACES])
def test_marks_what_is_wrong(layout: str, code: str, mark: str) -> None:
    text = MODEL + ("" if "batch" in layout else BATCH) + layout + "\n"
    found = findings(text)
    assert [finding.code for finding in found] == [code], found
    assert marked(text, found[0]) == mark
    assert found[0].help


MODELS = [
    ("num_layers=0", "CFG103", "0"),
    ("hidden_size='96'", "CFG102", "'96'"),
    ("num_head=4", "CFG101", "num_head"),
    ("vocab_size=100", "BAT104", "100"),
    ("num_heads=7", "TEN205", "96"),
    ("ffn_hidden_size=99", "TEN203", "99"),
]


@pytest.mark.parametrize(("change", "code", "mark"), MODELS)
def test_marks_what_is_wrong_in_a_model(change: str, code: str, mark: str) -> None:
    sizes = dict(num_layers=8, hidden_size=96, num_heads=24, vocab_size=256, max_seq_len=96)
    key = change.partition("=")[0]
    kept = [f"{name}={size}" for name, size in sizes.items() if name != key]
    text = f"model = dict(type='GPT', {', '.join(kept)}, {change})\n"
    if code == "TEN203":
        text += "parallel = dict(tensor=dict(size=2, mode='1d'))\n"
    found = findings(text)
    assert [finding.code for finding in found] == [code], found
    assert marked(text, found[0]) == mark


def test_a_variable_keeps_the_location_of_its_value() -> None:
    text = MODEL + "STAGES = 3\nparallel = dict(pipeline=STAGES)\n"
    (found,) = findings(text)
    assert (found.code, found.location.line, marked(text, found)) == ("PAR101", 2, "3")


def test_a_location_in_an_imported_file(tmp_path: Path) -> None:
    (tmp_path / "common.py").write_text("train = dict(steps=0, dist=dict(pipeline_parallel_size=1))\n")
    main = tmp_path / "main.py"
    main.write_text(MODEL + "from .common import train\ntrain.dist.pipeline_parallel_size = 3\n")
    found = lint(str(main), 8)
    assert [(finding.code, Path(finding.location.path).name, finding.location.line) for finding in found] == [
        ("PAR101", "main.py", 3),
        ("CFG103", "common.py", 1),
    ]


def test_an_override_is_located_on_the_command_line() -> None:
    found = findings(MODEL, overrides=["train.steps=3", "parallel.pipeline=3"])
    assert [(finding.code, finding.location.path, finding.location.line) for finding in found] == [
        ("PAR101", COMMAND_LINE, 1)
    ]
    assert found[0].location.column == len("train.steps=3 parallel.pipeline=") + 1


def test_unknown_keys_of_overrides_are_errors() -> None:
    assert codes(MODEL, overrides=["train.stepz=3"]) == ["CFG101"]
    assert codes(MODEL, overrides=["trian.steps=3"]) == ["CFG101"]
    assert codes(MODEL, overrides=["parallel.tensor.size=2", "parallel.tensor.mode=1d", "parallel.pipeline=2"]) == []


def test_all_findings_at_once_in_file_order() -> None:
    text = (
        "parallel = dict(pipeline=3, tensor=dict(size=2))\n"
        "zero = dict(stage=9)\n"
        "model = dict(type='GPT', num_layers=2, hidden_size=95, num_heads=24, vocab_size=256, max_seq_len=96)\n"
        "train = dict(stepz=1)\n"
    )
    found = findings(text)
    assert [finding.code for finding in found] == ["PAR101", "PIP101", "TEN101", "CFG103", "TEN205", "CFG101"]
    assert [finding.location for finding in found] == sorted(finding.location for finding in found)


def test_a_mistake_has_one_finding() -> None:
    """Rules about a value that could not be read are skipped."""
    assert codes(MODEL + "parallel = dict(pipeline='four', data=3)\n") == ["CFG102"]
    assert codes("parallel = dict(pipeline=2)\nmodel = dict(type='GPT', num_layers=undefined, hidden_size=96,"
                 " num_heads=24, vocab_size=256, max_seq_len=96)\n") == ["CFG010"]  # fmt: skip
    assert codes("model = 1 +\n") == ["CFG001"]


def test_no_model_is_an_error_at_the_start() -> None:
    (found,) = findings("parallel = dict(pipeline=2)\n")
    assert (found.code, found.location.line, found.location.column) == ("CFG107", 1, 1)


def test_a_missing_file_is_a_finding(tmp_path: Path) -> None:
    (found,) = lint(str(tmp_path / "nothing.py"), 8)
    assert (found.code, found.severity) == ("CFG009", "error")


def test_one_info_without_a_world_size() -> None:
    assert codes(MODEL + "parallel = dict(pipeline=3, data=7)\n", world=None) == ["CFG112"]
    assert codes(MODEL + "parallel = dict(pipeline=0)\n", world=None) == ["CFG103", "CFG112"]


def test_an_unknown_model_skips_its_rules() -> None:
    found = findings("from my_package import Net\nmodel = LazyCall(Net)(depth=3)\nfrom dslpar import LazyCall\n")
    assert "CFG010" in [finding.code for finding in found]  # used before its import
    found = findings("from my_package import Net\nfrom dslpar import LazyCall\nmodel = LazyCall(Net)(depth=3)\n")
    assert [(finding.code, finding.severity) for finding in found] == [("CFG111", "info")]
    assert "my_package.Net" in found[0].message


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("parallel = dict(pipeline=2)\ntrain = dict(dist=dict(pipeline_parallel_size=4))", ["PAR104"]),
        ("parallel = dict(pipeline=2)\ntrain = dict(dist=dict(pipeline_parallel_size=2))", []),
        ("parallel = dict(pipeline=2)\ntrain = dict(dist=dict(pipeline_parallel_size=1))", []),
        ("parallel = dict(pipeline=2)\ntrain = dict(dist=dict(pipeline_parallel_size=None))", []),
        ("parallel = dict(pipeline=2)\ntrain = dict(dist=dict(tensor_parallel_size=2))", ["PAR104"]),
        ("parallel = dict(tensor=dict(size=2, mode='1d'))\ntrain = dict(dist=dict(tensor_parallel_size=2))", []),
        (
            "parallel = dict(tensor=dict(size=4, mode='2d'))\ntrain = dict(dist=dict(tensor_parallel_size=4))",
            ["PAR104"],
        ),
        ("parallel = dict(data=8)\ntrain = dict(dist=dict(data_parallel_size=1))", []),
        ("train = dict(dist=dict(data_parallel_size=1))", []),
        ("train = dict(dist=dict(data_parallel_size=4))", ["PAR103"]),
        ("parallel = dict(pipeline=2)\ntrain = dict(dist=dict(custom_pipeline_stage_id=[0]*3+[1]*5))", ["PAR104"]),
    ],
)
def test_two_forms(layout: str, expected: list[str]) -> None:
    before = "train = dict(dist=dict())\n" if "train." in layout else ""
    assert codes(MODEL + BATCH + before + layout + "\n") == expected


def test_aliases() -> None:
    cfg = "dict(hidden_layers=8, hidden_size=96, num_attention_heads=24, vocab_size=256, max_seq_length=96)"
    text = f"from dslpar import LazyCall\nfrom dslpar.models import GPT\nmodel = LazyCall(GPT)(cfg={cfg})\n"
    assert codes(text) == []
    (found,) = findings(text + "model.cfg.num_attention_heads = 0\n")
    assert (found.code, found.key, found.location.line) == ("CFG103", "model.cfg.num_attention_heads", 4)
