"""`dslpar import` of Megatron-LM's scripts and GPT-NeoX's YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.linter import check
from dslpar.migrate.sources import read_text
from dslpar.migrate.writer import file_of
from tests.support.paths import ROOT
from tests.unit.migrate.test_migrate import by_key, errors_of, fates, job_of, made_of

TREES = ROOT / "tests/support/foreign_configs"
SCRIPT, NEOX = TREES / "megatron/pretrain_gpt.sh", TREES / "gpt_neox/small.yml"
SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32 --vocab-size 256"


def test_a_script_of_megatron_lm() -> None:
    made = made_of(SCRIPT.read_text(), "run.sh")
    assert made.source.name == "megatron"
    text = file_of(made)
    assert errors_of(text, 32) == []
    job = job_of(text, 32)
    model = job.spec.model
    assert (model.num_layers, model.hidden_size, model.num_heads, model.vocab_size) == (24, 1024, 16, 50304)  # type: ignore[union-attr]
    assert (job.mesh.pipe, job.mesh.data, job.mesh.tensor.size, job.batch) == (4, 4, 2, (256, 2, 32))
    told = fates(made)
    assert told["--adam-beta1"] == ("changed", "optimizer.betas", (0.9, 0.95))
    assert told["--lr-warmup-fraction"] == ("changed", "lr_scheduler.warmup_steps", 430)
    assert told["--recompute-granularity"] == ("changed", "activation_checkpoint", 2)
    assert told["--initial-loss-scale"] == ("changed", "precision.initial_scale_power", 16)
    left = {key for key, (fate, *_) in told.items() if fate == "needed"}
    assert left == {"--save", "--data-path"}, "what a shell is given"
    assert told["--lr-decay-iters"] == ("changed", "lr_scheduler.decay_steps", 430000)
    assert job.spec.lr_scheduler.decay_steps == 430000  # type: ignore[union-attr]
    assert by_key(made)["--save"].location.line == line_of(SCRIPT.read_text(), "=$1"), (
        "where the value is to be written"
    )
    added = {entry.to: entry.value for entry in made.entries if entry.fate == "added"}
    assert added["model.dropout"] == 0.1, "Megatron-LM drops where nobody says so"


def line_of(text: str, part: str) -> int:
    """Return the number of the line in which a part begins."""
    return text[: text.index(part)].count("\n") + 1


def test_a_yaml_of_gpt_neox() -> None:
    made = made_of(NEOX.read_text(), "20B.yml")
    assert made.source.name == "gpt_neox", "fp16 does not make it ColossalAI's"
    told = fates(made)
    assert told["pipe-parallel-size"] == ("renamed", "parallel.pipeline.size", 4)
    assert told["optimizer.type"] == ("changed", "optimizer.type", "AdamW")
    assert told["zero_optimization.stage"] == ("renamed", "zero.stage", 1)
    assert told["fp16.initial_scale_power"] == ("renamed", "precision.initial_scale_power", 12)
    assert told["no-weight-tying"] == ("changed", "model.tie_embeddings", False)
    left = {entry.key or entry.to for entry in made.entries if entry.fate == "needed"}
    assert left == {"rotary_pct", "gpt_j_residual", "model.vocab_size"}
    text = file_of(made).replace("# needs you: vocab_size", "vocab_size=50432,  #")
    assert errors_of(text, 96) == []
    job = job_of(text, 96)
    assert (job.mesh.pipe, job.mesh.tensor.size, job.batch) == (4, 2, (1536, 4, 32))


@pytest.mark.parametrize(
    ("argument", "key", "outcome"),
    [
        ("--swiglu", "--swiglu", ("changed", "model.activation", "swiglu")),
        ("--normalization RMSNorm", "--normalization", ("changed", "model.norm", "rmsnorm")),
        ("--position-embedding-type rope", "--position-embedding-type", ("changed", "model.positions", "rotary")),
        ("--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights",
         ("changed", "model.tie_embeddings", False)),
        ("--context-parallel-size 2", "--context-parallel-size", ("renamed", "parallel.context.size", 2)),
        ("--tensor-model-parallel-size 1", "--tensor-model-parallel-size", ("dropped", "", None)),
        ("--recompute-granularity selective", "--recompute-granularity", ("dropped", "", None)),
        ("--kv-channels 16", "--kv-channels", ("dropped", "", None)),
        ("--num-query-groups 2", "--num-query-groups", ("dropped", "", None)),
        ("--group-query-attention --num-query-groups 2", "--num-query-groups", ("renamed", "model.num_kv_heads", 2)),
        ("--use-distributed-optimizer", "--use-distributed-optimizer", ("changed", "zero.stage", 1)),
        ("--optimizer sgd", "--optimizer", ("changed", "optimizer.type", "SGD")),
    ],
)  # fmt: skip
def test_arguments_one_by_one(argument: str, key: str, outcome: tuple[str, str, object]) -> None:
    assert fates(made_of(f"python p.py {SMALL} {argument}", "a.sh"))[key] == outcome


PIPELINE = f"{SMALL.replace('--num-layers 2', '--num-layers 16')} --pipeline-model-parallel-size 4"


@pytest.mark.parametrize(
    ("argument", "chunks"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 1", 4),
        ("--num-virtual-stages-per-pipeline-rank 2", 2),
        ("--virtual-pipeline-model-parallel-size 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 4", None),
        ("--num-virtual-stages-per-pipeline-rank 1", None),
    ],
)
def test_virtual_stages_are_chunks(argument: str, chunks: int | None) -> None:
    made = made_of(f"python p.py {PIPELINE} {argument} --micro-batch-size 2 --global-batch-size 16", "a.sh")
    told = fates(made)[argument.partition(" ")[0]]
    assert told == (("changed", "schedule.num_model_chunks", chunks) if chunks else ("dropped", "", None))
    assert made.values.get("schedule.type") == ("interleaved" if chunks else None)
    text = file_of(made)
    assert errors_of(text, 4) == []
    assert job_of(text, 4).chunks == (4, chunks or 1)


@pytest.mark.parametrize(
    ("arguments", "fate"),
    [
        (f"{SMALL} --num-layers-per-virtual-pipeline-stage 1", "dropped"),  # no pipeline
        (f"{SMALL} --num-virtual-stages-per-pipeline-rank 2", "dropped"),
        (f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 3", "needed"),
        (f"{PIPELINE} --num-layers-per-virtual-pipeline-stage $LAYERS", "needed"),
        (f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 0", "needed"),
        (f"{PIPELINE.replace('size 4', 'size $PP')} --num-layers-per-virtual-pipeline-stage 2", "needed"),
    ],
)
def test_virtual_stages_that_are_none(arguments: str, fate: str) -> None:
    made = made_of(f"python p.py {arguments}", "a.sh")
    assert [fate for key, (fate, *_) in fates(made).items() if "-virtual-" in key] == [fate]
    assert not [key for key in made.values if key.startswith("schedule")]


def test_a_pipeline_of_unknown_size_has_chunks() -> None:
    arguments = f"{PIPELINE.replace('size 4', 'size $PP')} --num-virtual-stages-per-pipeline-rank 2"
    made = made_of(f"python p.py {arguments}", "a.sh")
    assert (made.values["schedule.num_model_chunks"], made.values["schedule.type"]) == (2, "interleaved")


def test_an_argument_without_a_row_is_not_called_unknown_to_megatron_lm() -> None:
    entry = by_key(made_of(f"python p.py {SMALL} --some-new-flag 3", "a.sh"))["--some-new-flag"]
    assert (entry.fate, entry.why) == ("needed", "dslpar import has no row for this key: leave it out")


def test_swiglu_is_as_wide_as_megatron_lm_makes_it() -> None:
    made = made_of(f"python p.py {SMALL.replace('64', '1024')} --swiglu", "a.sh")
    assert made.values["model.ffn_hidden_size"] == int(4 * 1024 * 2 / 3) // 64 * 64


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.py"
    assert main(["import", str(SCRIPT), "-o", str(out), "--world-size", "32"]) == 1, "the schedule needs the author"
    assert "(Megatron-LM) -> " in capsys.readouterr().out
    assert not [item for item in check.lint(check.load(out), 32) if item.severity == "error"]
    assert read_text(out.read_text(), str(out)).name == "dslpar"


STAGES = f"{SMALL.replace('--num-layers 2', '--num-layers 20')} --pipeline-model-parallel-size 4"


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ("--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 4", [4, 6, 6, 4]),
        ("--decoder-first-pipeline-num-layers 2", [2, 6, 6, 6]),
        ("--decoder-last-pipeline-num-layers 2", [6, 6, 6, 2]),
        ("--account-for-embedding-in-pipeline-split --num-layers 19", [4, 5, 5, 5]),
        ("--account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split --num-layers 22",
         [5, 6, 6, 5]),
        ("--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4", None),
        ("--decoder-first-pipeline-num-layers 4 --num-layers-per-virtual-pipeline-stage 1", None),
    ],
)  # fmt: skip
def test_layers_of_the_first_and_last_stage_are_counts(arguments: str, counts: list[int] | None) -> None:
    made = made_of(f"python p.py {STAGES} {arguments} --micro-batch-size 1 --global-batch-size 8", "a.sh")
    assert made.values.get("parallel.pipeline.counts") == counts
    key = arguments.partition(" ")[0]
    assert fates(made)[key][:2] == ("changed" if counts else "needed", "parallel.pipeline.counts")
    if counts:
        assert errors_of(file_of(made), 4) == []
        assert job_of(file_of(made), 4).spec.parallel.pipeline.counts == tuple(counts)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "key", "outcome"),
    [
        ("--global-batch-size 64 --train-samples 64000", "--train-samples", ("changed", "train.steps", 1000)),
        ("--global-batch-size 64 --train-samples 6399", "--train-samples", ("changed", "train.steps", 99)),
        ("--train-samples 64000", "--train-samples", ("needed", "train.steps", 64000)),
        ("--global-batch-size 64 --lr-warmup-samples 6400", "--lr-warmup-samples",
         ("changed", "lr_scheduler.warmup_steps", 100)),
        ("--train-samples 64 --lr-decay-samples 64", "--lr-decay-samples", ("dropped", "", None)),
        ("--global-batch-size 4 --seq-length 32 --train-tokens 1000", "--train-tokens", ("changed", "train.steps", 8)),
        ("--data-path my_text_document", "--data-path", ("needed", "data.path", "my_text_document")),
        ("--data-path 0.3 a 0.7 b", "--data-path", ("needed", "data.path", [0.3, "a", 0.7, "b"])),
        ("--split 949,50,1", "--split", ("changed", "data.eval_fraction", 0.05)),
        ("--split 98,2,0", "--split", ("changed", "data.eval_fraction", 0.02)),
        ("--save a --load a", "--load", ("dropped", "", None)),
        ("--save a --load b", "--load", ("needed", "", "b")),
        ("--normalization rmsnorm", "--normalization", ("renamed", "model.norm", "rmsnorm")),
        ("--num-key-value-heads 2", "--num-key-value-heads", ("renamed", "model.num_kv_heads", 2)),
        ("--fp8-format hybrid", "--fp8-format", ("needed", "precision.dtype", "hybrid")),
        ("--fp8-format hybrid --fp8-margin 0", "--fp8-margin", ("dropped", "", 0)),
        ("--zero-reduce-bucket-size 1", "--zero-reduce-bucket-size", ("dead", "", 1)),
        ("--ds-sequence-parallel-size 2", "--ds-sequence-parallel-size", ("changed", "parallel.context.size", 2)),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "--use-megatron-fsdp",
         ("changed", "zero.stage", 2)),
        ("--disable-bias-linear", "--disable-bias-linear", ("needed", "model.bias", True)),
        ("--disable-bias-linear --normalization RMSNorm", "--disable-bias-linear", ("changed", "model.bias", False)),
        ("--qk-layernorm", "--qk-layernorm", ("needed", "", True)),
        ("--num-experts 1 --topk 4", "--topk", ("dropped", "", None)),
        ("--muon-momentum 0.5", "--muon-momentum", ("dropped", "", None)),
        ("--optimizer muon --muon-momentum 0.5", "--muon-momentum", ("needed", "", 0.5)),
        ("--use-tp-pp-dp-mapping", "--use-tp-pp-dp-mapping", ("changed", "parallel.order", ("data", "pipe", "tensor"))),
    ],
)  # fmt: skip
def test_more_arguments_one_by_one(arguments: str, key: str, outcome: tuple[str, str, object]) -> None:
    assert fates(made_of(f"python p.py {SMALL} {arguments}", "a.sh"))[key] == outcome


def test_a_placeholder_is_no_value_and_data_is_not_dropped() -> None:
    script = f"P=<Specify path>\nD=<Specify path and file prefix>_text\npython p.py {SMALL} --save $P --data-path $D"
    made = made_of(script, "a.sh")
    assert "train.output_dir" not in made.values
    entry = by_key(made)["--save"]
    assert (entry.fate, entry.to, entry.location.line) == ("needed", "train.output_dir", 1)
    assert entry.why == "could not be read: <Specify path> is a placeholder: write the value here"
    assert [by_key(made)["--data-path"][index] for index in (1, 2)] == ["needed", "data.path"]


def test_arguments_that_may_be_missing_are_an_entry_of_their_own() -> None:
    script = f"E=()\nif [[ $X == 1 ]]; then E+=( --swiglu ); fi\npython p.py {SMALL} --tensor-model-parallel-size 2"
    made = made_of(f'{script} --sequence-parallel "${{E[@]}}" --micro-batch-size 1', "a.sh")
    assert fates(made)["--sequence-parallel"] == ("renamed", "parallel.tensor.sequence", True)
    entries = [entry for entry in made.entries if entry.fate == "needed" and entry.why.startswith("arguments")]
    assert [(entry.why, entry.location.line) for entry in entries] == [
        ("arguments may be missing here: `if` of line 2 decides: '--swiglu' or nothing", 3)
    ]


MIXTURE = (
    "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 "
    "--tensor-model-parallel-size {tensor} --expert-model-parallel-size {expert} {more}"
)


@pytest.mark.parametrize(
    ("tensor", "expert", "more", "size"),
    [
        (1, 8, "", 8),
        (2, 4, "", 8),  # Megatron-LM divides each expert over the tensor ranks, too
        (2, 4, "--expert-tensor-parallel-size 1", 4),
    ],
)
def test_expert_parallelism_of_megatron_lm_becomes_the_ranks_that_hold_all_experts(
    tensor: int, expert: int, more: str, size: int
) -> None:
    told = fates(made_of(MIXTURE.format(tensor=tensor, expert=expert, more=more), "run.sh"))
    assert told["--expert-model-parallel-size"] == ("changed", "parallel.expert.size", size)


def test_what_of_a_mixture_has_a_counterpart_and_what_needs_its_author() -> None:
    more = "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    more += "--moe-aux-loss-coeff 1e-2 --num-experts 8 --moe-router-topk 2 --moe-token-drop-policy position "
    more += "--moe-expert-capacity-factor 1.5 "
    more += "--moe-layer-freq 2 --moe-router-num-groups 2 "
    told = fates(made_of(MIXTURE.format(tensor=1, expert=1, more=more), "run.sh"))
    dropped = ("--expert-model-parallel-size", "--moe-grouped-gemm", "--moe-token-dispatcher-type")
    assert {told[key][0] for key in (*dropped, "--moe-router-load-balancing-type")} == {"dropped"}
    needed = ("--num-experts", "--moe-layer-freq", "--moe-aux-loss-coeff", "--moe-token-drop-policy")
    assert {told[key][0] for key in (*needed, "--moe-router-num-groups")} == {"needed"}


MIXTRAL = """--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope --num-experts 8 \\
    --untie-embeddings-and-output-weights --moe-router-topk 3 --ffn-hidden-size 96 --expert-model-parallel-size 2 """


@pytest.mark.parametrize(
    ("more", "experts"),
    [
        ("", {"num": 8, "balance": 0.0, "top_k": 3}),
        ("--moe-router-pre-softmax", {"num": 8, "balance": 0.0, "top_k": 3, "renormalize": False}),
        (
            "--moe-router-score-function sigmoid --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 64",
            {"num": 8, "balance": 0.0, "top_k": 3, "ffn_hidden_size": 32, "shared": 2, "router": "sigmoid"},
        ),
        ("--moe-z-loss-coeff 0.25", {"num": 8, "balance": 0.0, "top_k": 3, "z_loss": 0.5}),
        ("--moe-z-loss-coeff 0 --moe-router-bias-update-rate 0.5", {"num": 8, "balance": 0.0, "top_k": 3}),
        ("--moe-router-enable-expert-bias", {"num": 8, "balance": 0.0, "top_k": 3, "bias_update": 0.001}),
        (
            "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.5",
            {"num": 8, "balance": 0.0, "top_k": 3, "bias_update": 0.5},
        ),
        (
            "--moe-router-score-function sigmoid --moe-router-pre-softmax",
            {"num": 8, "balance": 0.0, "top_k": 3, "router": "sigmoid"},
        ),
        (
            "--moe-router-score-function sigmoid --moe-router-topk 1",
            {"num": 8, "balance": 0.0, "top_k": 1, "router": "sigmoid", "renormalize": False},
        ),
        ("--moe-layer-freq 1", {"num": 8, "balance": 0.0, "top_k": 3}),
        (
            "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity --moe-token-drop-policy probs",
            {"num": 8, "balance": 0.0, "top_k": 3, "capacity_factor": 1.5},
        ),
        (
            "--moe-expert-capacity-factor -1 --moe-token-drop-policy position",
            {"num": 8, "balance": 0.0, "top_k": 3},
        ),
    ],
)
def test_a_mixture_of_megatron_lm_is_a_gpt_with_experts(more: str, experts: dict[str, object]) -> None:
    made = made_of(f"python p.py {SMALL} {MIXTRAL} {more}", "mixtral.sh")
    found = {key.removeprefix("model.experts."): value for key, value in made.values.items() if ".experts." in key}
    assert found == experts


@pytest.mark.parametrize(
    ("arguments", "key", "told"),
    [
        ("--num-experts 8", "--num-experts", "dslpar's experts have no biases: choose --disable-bias-linear"),
        ("--num-experts 8 --disable-bias-linear --topk 2", "--num-experts", "Megatron-DeepSpeed drops tokens"),
        (
            "--num-experts 8 --disable-bias-linear --create-moe-param-group",
            "--num-experts",
            "Megatron-DeepSpeed drops tokens",
        ),
        (
            "--num-experts 8 --disable-bias-linear --disable-moe-token-dropping",
            "--num-experts",
            "Megatron-DeepSpeed has another load-balancing loss",
        ),
        (
            "--num-experts 8 --disable-bias-linear --disable-moe-token-dropping --moe-loss-coeff 0 --topk 2",
            "--num-experts",
            "Megatron-DeepSpeed samples the second expert",
        ),
        ("--num-experts 8 --moe-expert-capacity-factor 0", "--moe-expert-capacity-factor", "choose a capacity above 0"),
        (
            "--num-experts 8 --moe-shared-expert-intermediate-size 70",
            "--moe-shared-expert-intermediate-size",
            "choose the number of shared experts",
        ),
    ],
)
def test_a_mixture_that_a_gpt_does_not_have_needs_its_author(arguments: str, key: str, told: str) -> None:
    made = made_of(f"python p.py {SMALL} {arguments}", "a.sh")
    assert by_key(made)[key].why.startswith(told)


def test_a_mixture_of_megatron_deepspeed_has_its_defaults() -> None:
    experts = "--num-experts 8 --disable-bias-linear --disable-moe-token-dropping --moe-loss-coeff 0"
    made = made_of(f"python p.py {SMALL} {experts}", "a.sh")
    found = {key.removeprefix("model.experts."): value for key, value in made.values.items() if ".experts." in key}
    assert found == {"num": 8, "balance": 0.0, "every": 2, "top_k": 1, "renormalize": False}
    made = made_of(
        f"python p.py {SMALL} {experts} --disable-moe-top2-2nd-expert-sampling --topk 2 --expert-interval 4", "a.sh"
    )
    found = {key.removeprefix("model.experts."): value for key, value in made.values.items() if ".experts." in key}
    assert found == {"num": 8, "balance": 0.0, "every": 4, "top_k": 2}
