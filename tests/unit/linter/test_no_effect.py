"""DEAD110 and up, CFG120, CFG121: keys without an effect have a finding, and no others do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dslpar.linter.registry import page_of
from dslpar.linter.rule import Rule
from dslpar.linter.rules.no_effect import _IDLE, _stages_of
from dslpar.migrate.registry import TABLES
from dslpar.schema import deepspeed_policy
from dslpar.schema.keys import WITHOUT_COUNTERPART, synonym_of
from dslpar.schema.types import SYMMETRIC_MEMORY
from tests.support.lint import MODEL, codes, findings, marked

PIPED = "parallel = dict(pipeline=2)\n"
UNTIED = "model.tie_embeddings = False\nparallel = dict(pipeline=8)\n"
GATHER = "zero = dict(stage=1, overlap_param_gather=True)\n"

OVERLAPPED = "parallel = dict(tensor=dict({}, comm_overlap='symmetric_memory'))"
SWITCH = "without quotes ('on' is a string, in YAML 1.2 too)"
# the text, the message, the text at the caret
TOLD = [
    ("parallel = dict(tensor=dict(size=1, mode='1d', sequence=True))", "DEAD110", "True"),
    ("parallel = dict(tensor=dict(size=1, mode='3d', residual='hidden', keep='x'))", "DEAD110", "'hidden'"),
    ("parallel = dict(tensor=dict(size=1, mode='2d', keep='x'))", "DEAD110", "'x'"),
    ("parallel = dict(order=('data', 'pipe', 'tensor'))", "DEAD111", "('data', 'pipe', 'tensor')"),
    ("parallel = dict(pipeline=8, order=('data', 'pipe', 'tensor'))", "DEAD111", "('data', 'pipe', 'tensor')"),
    ("train = dict(eval_steps=4)", "DEAD112", "4"),
    ("train = dict(steps=10, eval_interval=11)", "DEAD113", "11"),
    ("train = dict(steps=10, log_interval=11)", "DEAD113", "11"),
    ("train = dict(steps=10, save_interval=11)", "DEAD113", "11"),
    ("lr_scheduler = dict(min_lr=1e-5)", "DEAD114", "1e-5"),
    ("lr_scheduler = dict(decay_steps=50)", "DEAD114", "50"),
    ("parallel = dict(pipeline=8)\nzero = 1", "DEAD115", "1"),
    ("parallel = dict(tensor=dict(size=8, mode='1d'))\nzero = 3", "DEAD115", "3"),
    ("zero = dict(stage=0, reduce_bucket_size=5e8)", "DEAD116", "5e8"),
    ("zero = dict(stage=1, sub_group_size=1e9)", "DEAD116", "1e9"),
    ("zero = dict(stage=3, round_robin_gradients=True)", "DEAD116", "True"),
    ("zero = dict(stage=2, allgather_partitions=True)", "DEAD116", "True"),
    ("zero = dict(stage=1, overlap_comm=True)\nprecision = 'bf16'", "DEAD116", "True"),
    (PIPED + "zero = dict(stage=1, overlap_comm=True)", "DEAD116", "True"),
    (PIPED + "zero = dict(stage=1, overlap_comm=True, offload_optimizer='cpu')", "DEAD116", "True"),
    ("deepspeed = dict(aio=dict(block_size=1048576))", "DEAD117", "aio"),
    (
        "parallel = dict(tensor=dict(size=2, mode='1d', comm_overlap=True))\ntrain = dict(steps=1, compile=True)",
        "DEAD121",
        "True",
    ),
    (OVERLAPPED.format("size=2, mode='1d'"), "DEAD125", "'symmetric_memory'"),
    (OVERLAPPED.format("size=4, mode='2d'"), "DEAD125", "'symmetric_memory'"),
    (OVERLAPPED.format("size=4, mode='cuboid', shape=(1, 2, 2)"), "DEAD125", "'symmetric_memory'"),
    # only another rule reports these
    (OVERLAPPED.format("size=1, mode='1d', sequence=True"), "DEAD110", "True"),
    (OVERLAPPED.format("size=2, mode='sequence'"), "TEN108", "'symmetric_memory'"),
    (
        OVERLAPPED.format("size=2, mode='1d'") + "\ntrain = dict(steps=1, compile=True)",
        "DEAD121",
        "'symmetric_memory'",
    ),
    ("train = dict(steps=10, check_replicas=11)", "DEAD113", "11"),
    (UNTIED + "train = dict(check_replicas=5)", "DEAD126", "5"),
    ("train = dict(on_replica_difference='stop')", "DEAD127", "'stop'"),
    ("train = dict(steps=1, compile_components=['loss'])", "DEAD124", "['loss']"),
    ("train = dict(steps=1, compile_backend='aot_eager')", "DEAD124", "'aot_eager'"),
    ("zero = 3\nprecision = dict(dtype='bf16', check_grad_overflow=False)", "DEAD118", "False"),
    ("zero = 1\nprecision = dict(dtype='bf16', immediate_grad_update=True)", "DEAD118", "True"),
    ("zero = 2\nprecision = dict(dtype='bf16', immediate_grad_update=True)", "DEAD118", "True"),
    ("zero = dict(overlap_param_gather=True)", "DEAD120", "True"),
    ("zero = dict(stage=3, overlap_param_gather=True)", "DEAD120", "True"),
    (PIPED + "zero = dict(stage=0, overlap_param_gather=True)", "DEAD120", "True"),
    (f"parallel = dict(pipeline=8)\n{GATHER}precision = 'bf16'", "DEAD120", "True"),
    (f"parallel = dict(pipeline=8)\n{GATHER}", "DEAD115", "1"),
    ("BATCH_SIZE = 4", "CFG121", "BATCH_SIZE"),
    ("NUM_EPOCHS = 60", "CFG121", "NUM_EPOCHS"),
    ("LEARNING_RATE = 1e-3", "CFG121", "LEARNING_RATE"),
    ("NUM_MICRO_BATCHES = 4", "CFG121", "NUM_MICRO_BATCHES"),
    ("TENSOR_SHAPE = (4, 512, 64)", "CFG121", "TENSOR_SHAPE"),
    ("cudnn_benchmark = True", "CFG121", "cudnn_benchmark"),
    ("micro_batch_size = 4", "CFG121", "micro_batch_size"),
    ("train = dict(steps=9, dist=dict(data_parallel_size=1))\ntrain.update(dist=dict())", "CFG120", "dict()"),
]
# keys with an effect, or documented forms of other frameworks
SILENT = [
    "train = dict(check_replicas=5, on_replica_difference='report')",
    "train = dict(check_replicas=5)\nparallel = dict(tensor=dict(size=8, mode='1d'))",
    "parallel = dict(pipeline=8)\ntrain = dict(check_replicas=5)",  # with a GPT that ties its embeddings
    OVERLAPPED.format("size=2, mode='1d', sequence=True"),
    OVERLAPPED.format("size=8, mode='3d'"),
    OVERLAPPED.format("size=2, mode='cuboid', shape=(1, 2, 1), residual='batch'"),
    OVERLAPPED.format("size=2, mode='cuboid', shape=(1, 1, 2), inner='batch'"),
    "parallel = dict(tensor=dict(size=2, mode='1d', comm_overlap=True))\n"
    "train = dict(steps=1, compile=True, compile_components=['loss'])",
    "train = dict(steps=1, compile=True, compile_components=('layers',), compile_backend='aot_eager')",
    "parallel = dict(tensor=dict(size=1, mode='1d'))",
    "parallel = dict(tensor=dict(size=2, mode='1d', sequence=True))",
    "parallel = dict(order=('pipe', 'data', 'tensor'))",
    PIPED + "parallel.order = ('data', 'pipe', 'tensor')",
    "train = dict(eval_steps=4, eval_interval=50)",
    "train = dict(steps=10, eval_interval=10, log_interval=10, save_interval=10)",
    "train = dict(save_interval=0)",
    "lr_scheduler = dict(type='linear', min_lr=1e-5)",
    "lr_scheduler = dict(min_lr=0.0)",
    "zero = 1",
    "parallel = dict(pipeline=8)\nzero = 1\nprecision = 'bf16'",
    "parallel = dict(pipeline=8)\nzero = dict(stage=1, offload_optimizer='cpu')",
    "parallel = dict(tensor=dict(size=8, mode='1d'))\nzero = dict(stage=3, offload_param='cpu')",
    "zero = dict(stage=2, reduce_bucket_size=5e8, allgather_bucket_size=5e8)",
    "zero = dict(stage=3, overlap_comm=True)",
    "zero = dict(stage=3, stage3_prefetch_bucket_size=5e7, sub_group_size=1e9, overlap_comm=True)",
    "zero = dict(stage=1, allgather_bucket_size=5e8)\nprecision = 'bf16'",
    "zero = dict(stage=1, reduce_bucket_size=5e8, offload_optimizer='cpu')\nprecision = 'bf16'",
    PIPED + "zero = dict(stage=1, overlap_comm=False)",
    PIPED + GATHER + "precision = 'bf16'",
    "zero = dict(stage=2, overlap_param_gather=True, allgather_bucket_size=1000, offload_optimizer='cpu')",
    "zero = dict(stage=3, overlap_param_gather=False)",
    "zero = 2\nprecision = dict(dtype='bf16', check_grad_overflow=False)",
    "zero = 1\nprecision = dict(dtype='bf16', check_grad_overflow=False)",
    "zero = dict(stage=1, reduce_bucket_size=5e7)\nprecision = 'bf16'",
    "micro_batch_size = 4\nbatch = dict(micro_size=micro_batch_size)",
    "MICRO_BATCH_SIZE = 4",
    "train = dict(steps=9, dist=dict(data_parallel_size=1))\ntrain.update(dist=dict(data_parallel_size=8))",
    "train = dict(steps=9)\ntrain.update(dict(dist=dict(pipeline_parallel_size=2)))",
    "_all = dict(optimizer=dict(type='SGD', lr=1.0))\n_all.update(optimizer=dict(type='AdamW'))",
]


@pytest.mark.parametrize(("text", "code", "mark"), TOLD, ids=[text for text, _, _ in TOLD])
def test_a_key_without_effect_has_one_finding(text: str, code: str, mark: str) -> None:
    whole = f"{MODEL}{text}\n"
    (found,) = findings(whole)
    assert (found.code, marked(whole, found)) == (code, mark)
    assert found.help


@pytest.mark.parametrize("text", SILENT)
def test_a_key_with_an_effect_has_no_finding(text: str) -> None:
    assert codes(f"{MODEL}{text}\n") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "zero = dict(stage=2, sub_group_size=1e9)",
            "sub_group_size has no effect at ZeRO stage 2: it is for stage 3; leave sub_group_size out, or stage=3",
        ),
        (
            PIPED + "zero = dict(stage=1, sub_group_size=1e9)",
            "sub_group_size has no effect at ZeRO stage 1: it is for stage 3; leave sub_group_size out",
        ),
        (
            "zero = dict(stage=0, overlap_comm=True)",
            "overlap_comm has no effect at ZeRO stage 0: it is for stage 1 or 2 or 3; leave overlap_comm out,"
            " or stage=1 or 2 or 3",
        ),
        (
            PIPED + "zero = dict(overlap_param_gather=True)",
            "overlap_param_gather has no effect at ZeRO stage 0: each rank updates all weights; leave"
            " overlap_param_gather out, or stage=1",
        ),
        (
            "zero = dict(stage=3, overlap_param_gather=True)",
            "overlap_param_gather has no effect at ZeRO stage 3: each layer's weights are gathered before it runs;"
            " leave overlap_param_gather out, or stage=1 or 2",
        ),
        (
            "parallel = dict(tensor=dict(size=8, mode='1d'))\nzero = dict(stage=2, overlap_param_gather=True)\n"
            "precision = 'bf16'",
            "overlap_param_gather has no effect: data is 1, and each rank has all weights; leave overlap_param_gather"
            " out",
        ),
        (
            "zero = dict(stage=1, allgather_partitions=True)",
            "allgather_partitions has no effect at ZeRO stage 1: DeepSpeed never uses it; leave allgather_partitions"
            " out",
        ),
        (
            "parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))\nzero = 1",
            "ZeRO 1 saves nothing: data is 8 / (pipeline 2 * tensor 4) = 1; zero = 0; or choose smaller sizes of"
            " pipeline and tensor",
        ),
        (
            "parallel = dict(tensor=dict(size=1, mode='1d', sequence=True))",
            "sequence has no effect: the tensor group has only one rank; leave sequence out; or choose a size over 1",
        ),
        (
            "parallel = dict(tensor=dict(size=1, mode='2.5d', depth=1, keep='x'))",
            "depth and keep have no effect: the tensor group has only one rank; leave depth and keep out; or choose a"
            " size over 1",
        ),
        (
            "train = dict(steps=10, eval_interval=20)",
            "eval_interval 20 in a run of 10 steps: the run evaluates only before the first step and after the last;"
            " at most 10, or train.steps=20",
        ),
    ],
)
def test_messages(text: str, expected: str) -> None:
    (found,) = findings(f"{MODEL}{text}\n")
    assert f"{found.message}; {found.help}" == expected


def test_zero_on_one_rank_is_accepted() -> None:
    assert codes(MODEL + "zero = 1\n", 1) == []
    assert codes(MODEL + "zero = dict(stage=1, overlap_param_gather=True)\n", 1) == []
    assert codes(MODEL + "zero = 1\nparallel = dict(tensor=dict(size=2, mode='1d'))\n", 2) == ["DEAD115"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("parallel = dict(tensor=dict(size=1, mode='2.5d', depth=2))", "TEN106"),
        ("parallel = dict(tensor=dict(size=1, depth=2))", "TEN108"),
        ("train = dict(eval_steps='four')", "CFG102"),
        ("train = dict(steps='four', eval_interval=400)", "CFG102"),
        ("zero = 0\nprecision = dict(dtype='bf16', immediate_grad_update=True)", "PRE101"),
    ],
)
def test_what_another_rule_reports_is_not_reported_again(text: str, code: str) -> None:
    assert codes(f"{MODEL}{text}\n") == [code]


def test_a_run_shortened_on_the_command_line_is_accepted() -> None:
    text = MODEL + "train = dict(steps=100, eval_interval=50, log_interval=20)\n"
    assert codes(text, overrides=["train.steps=10"]) == []
    assert codes(text, overrides=["train.steps=10", "train.log_interval=30"]) == ["DEAD113"]


def test_min_lr_above_lr_has_one_finding() -> None:
    assert codes(MODEL + "lr_scheduler = dict(min_lr=1.0)\n") == ["BAT106"]


def test_keys_lost_by_update_are_named() -> None:
    (found,) = findings(f"{MODEL}train = dict(dist=dict(data_parallel_size=1, tensor_parallel_size=1))\n"
                        "train.update(dict(steps=5, dist=dict(tensor_parallel_size=2)))\n")  # fmt: skip
    assert found.message == "update() replaces 'dist', and drops its data_parallel_size"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("zero = dict(stage=1, forward_prefetch=True)", "here that is zero.overlap_param_gather"),
        (
            "zero = dict(stage=0, pipeline_loading_checkpoint=False)",
            "leave pipeline_loading_checkpoint out, or stage=3",
        ),
        ("train = dict(clip_gradient=1.0)", "here that is train.clip_grad_norm"),
        ("batch = dict(gradient_accumulation_steps=2)", "here that is batch.accumulation"),
        ("parallel = dict(model_parallel_size=2)", "add tensor=dict(size=..., mode='1d') to parallel"),
        ("fp16 = dict(enabled=True)", "choose precision, which is that here; or write _fp16 (if it is your own)"),
        ("train_iters = 500", "here that is train.steps; or write _train_iters (if it is your own)"),
        ("train = dict(stepz=1)", "did you mean 'steps'?"),
        ("optimizer = dict(lr='6e-4')", "6e-4 without quotes: '6e-4' is a string"),
        ("train = dict(steps='100')", "100 without quotes: '100' is a string"),
        ("train = dict(steps='1e3')", "1000 without quotes: '1e3' is a string"),
        ("model.bias = 'no'", "False without quotes ('no' is a string, in YAML 1.2 too)"),
        ("zero = dict(stage=3, overlap_comm='on')", f"True {SWITCH}"),
        (OVERLAPPED.format("size=2, mode='1d'").replace(SYMMETRIC_MEMORY, "on"), f"True {SWITCH}"),
        (OVERLAPPED.format("size=2, mode='1d'").replace("c_m", "c-m"), "did you mean 'symmetric_memory'?"),
        ("train = dict(compile=True, compile_components='loss')", "write ['loss']"),
        ("train = dict(compile=True, compile_components=['los'])", "choose a list of 'layers', 'loss', or both"),
        ("train = dict(steps='many')", "choose a whole number, at least 1 (and below 2**31)"),
    ],
)
def test_keys_of_other_frameworks_get_the_key_to_write(text: str, hint: str) -> None:
    (found,) = findings(f"{MODEL}{text}\n")
    assert found.help == hint


def test_every_key_of_zero_has_its_stages() -> None:
    """The table has every DeepSpeed key of the section; a missing one would count as used at every stage."""
    left = {name for name in deepspeed_policy.ZERO if _stages_of(name) == (0, 1, 2, 3)}
    refused_or_elsewhere = {
        "stage", "compute_grad_norm", "elastic_checkpoint", "legacy_stage1", "pipeline_loading_checkpoint",
        "zenflow", "offload_param", "offload_optimizer",
    }  # fmt: skip
    assert left <= refused_or_elsewhere


def test_deepspeed_never_uses_the_idle_keys() -> None:
    import importlib.util

    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    sources = {path: path.read_text(errors="replace") for path in (root / "runtime").rglob("*.py")}
    assert _stages_of("allgather_partitions") == ()
    assert "disable_allgather" in _IDLE
    for name in ("allgather_partitions", "disable_allgather"):
        users = [path for path, text in sources.items() if re.search(rf"\.(zero_)?{name}\b(?! =)", text)]
        assert {path.name for path in users} <= {"engine.py", "config.py"}, "only the getter, and where it is set"


def test_capitals_of_colossalai_are_told_by_the_name_that_import_gives_them() -> None:
    rows = [row for row in TABLES["colossalai"].rows if row.pattern.isupper() and not row.to.startswith("model.")]
    rule = page_of("CFG121")
    assert isinstance(rule, Rule)
    page = rule.text()
    assert len(rows) > 15
    for row in rows:
        key = synonym_of(row.pattern)
        assert (key or "") == row.to, row.pattern
        assert key or row.pattern in WITHOUT_COUNTERPART, row.pattern
        assert row.pattern in page, row.pattern


def test_capitals_that_the_file_uses_are_its_own() -> None:
    assert codes(f"{MODEL}BATCH_SIZE = 4\nNUM_EPOCHS = 3\nbatch = dict(micro_size=BATCH_SIZE)\n") == ["CFG121"]
    assert codes(f"{MODEL}CONFIG = dict(parallel=dict(pipeline=2))\n") == ["CFG121"]
    assert codes(f"{MODEL}_BATCH_SIZE = 4\nIMG_SIZE = 224\n") == []
