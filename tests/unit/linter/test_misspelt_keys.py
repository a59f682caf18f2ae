"""A misspelt key, or another framework's: one finding, and a fix only if it is certain."""

from __future__ import annotations

import pytest

from tests.support.lint import MODEL, findings

BIG = "model = dict(type='GPT', num_layers=8, hidden_size=96, num_heads=24, vocab_size=256, max_seq_len=96)\n"

# the text, the message, the fix
ONCE = [
    ("parallel = dict(tensor=dict(sise=2, mode='1d'))", "did you mean 'size'?", "size"),
    ("parallel = dict(tensor=dict(tp_size=2, mode='1d'))", "here that is parallel.tensor.size", None),
    ("parallel = dict(tensor=dict(size=2, mod='1d'))", "did you mean 'mode'?", "mode"),
    ("parallel = dict(pipeline=dict(sze=2, counts=[4, 4]))", "did you mean 'size'?", "size"),
    ("parallel = dict(pipline=2)\nbatch = dict(global_size=8, micro_size=2)", "did you mean 'pipeline'?", "pipeline"),
    ("activation_checkpoint = dict(intervall=1)", "did you mean 'interval'?", "interval"),
    ("precision = 'bf16'\nzero = dict(stge=1)", "did you mean 'stage'?", "stage"),
    ("zero = dict(zero_stage=2)", "here that is zero.stage", None),
    (
        "lr_scheduler = dict(type='WarmupDecayLR', warmup_num_steps=5, total_num_step=100)",
        "did you mean 'total_num_steps'?",
        "total_num_steps",
    ),
    (
        "lr_scheduler = dict(type='WarmupLR', warmup_num_step=5)",
        "did you mean 'warmup_num_steps'?",
        "warmup_num_steps",
    ),
    (
        "paralel = dict(pipeline=2)\nbatch = dict(global_size=8, micro_size=2)",
        "did you mean 'parallel'? Or write _paralel (if it is your own)",
        "parallel",
    ),
    ("scheduler = dict(type='WarmupLR')", "here that is lr_scheduler; or write _scheduler (if it is your own)", None),
]


@pytest.mark.parametrize(("text", "hint", "fix"), ONCE)
def test_a_misspelt_key_has_one_finding(text: str, hint: str, fix: str | None) -> None:
    (found,) = findings(f"{MODEL}{text}\n")
    assert found.help == hint
    assert (found.fix.text if found.fix else None) == fix


@pytest.mark.parametrize(
    ("name", "wrote", "hint", "fix"),
    [
        ("num_layers", "num_layer", "did you mean 'num_layers'?", "num_layers"),
        ("hidden_size", "n_embd", "here that is model.hidden_size", None),
        ("num_heads", "n_heads", "did you mean 'num_heads'?", "num_heads"),
        ("max_seq_len", "n_positions", "here that is model.max_seq_len", None),  # near to `positions`, and not meant
    ],
)
def test_a_required_key_of_the_model(name: str, wrote: str, hint: str, fix: str | None) -> None:
    (found,) = findings(BIG.replace(f"{name}=", f"{wrote}="))
    assert (found.code, found.help) == ("CFG101", hint)
    assert (found.fix.text if found.fix else None) == fix


def test_a_model_under_a_misspelt_name_is_not_missing() -> None:
    (found,) = findings(MODEL.replace("model", "modle"))
    assert (found.code, found.fix and found.fix.text) == ("CFG105", "model")


def test_a_layers_cfg_under_a_misspelt_name_is_not_missing() -> None:
    (found,) = findings("model = dict(type='Sequential', layer_cfg=[dict(type='Linear')])\n")
    assert (found.code, found.help) == ("CFG101", "did you mean 'layers_cfg'?")


@pytest.mark.parametrize("text", ["parallel = dict(tensor=dict(colour=2))", "activation_checkpoint = dict(enabled=1)"])
def test_a_key_that_means_nothing_does_not_stand_for_a_missing_one(text: str) -> None:
    assert [found.code for found in findings(f"{MODEL}{text}\n")] == ["CFG104", "CFG101"]


def test_a_key_of_zero_at_deepspeed_s_top_level() -> None:
    (found,) = findings(f"{MODEL}deepspeed = dict(overlap_comm=True)\n")
    assert (found.code, found.help) == ("DSC101", "write it under zero.overlap_comm")


def test_auto_of_transformers() -> None:
    (found,) = findings(f"{MODEL}zero = dict(stage=2, reduce_bucket_size='auto')\n")
    assert found.help.startswith("leave it out, or choose ")
    assert found.help.endswith(": transformers fills in 'auto', DeepSpeed does not")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("zero = dict(stage=1, pipeline_loading_checkpoint=True)\nprecision = 'bf16'", "ZER108"),
        ("zero = dict(stage=2, pipeline_loading_checkpoint=True)", "ZER108"),
        ("zero = dict(stage=2, pipeline_loading_checkpoint=False)", ""),
        ("zero = dict(stage=3, pipeline_loading_checkpoint=True)", ""),
        ("zero = dict(stage=0, pipeline_loading_checkpoint=True)", "DEAD116"),
    ],
)
def test_checkpoints_that_are_loaded_rank_by_rank(text: str, code: str) -> None:
    assert [found.code for found in findings(f"{MODEL}{text}\n")] == ([code] if code else [])


def test_a_float_that_is_whole_is_a_number_of_steps() -> None:
    """Examples of DeepSpeed's JSON in transformers have such floats."""
    assert findings(f"{MODEL}deepspeed = dict(steps_per_print=1e5)\n") == []


def test_an_illegal_size_has_no_perf_finding() -> None:
    model = MODEL.replace("num_heads=24", "num_heads=24, num_kv_heads=2")
    text = f"{model}parallel = dict(tensor=dict(size=4, mode='sequence', impl='ulysses'))\nbatch = dict(micro_size=1)\n"
    assert [found.code for found in findings(text, ignored=())] == ["TEN206"]


def test_hint_about_masters_fits_a_pipeline() -> None:
    text = "precision = dict(dtype='bf16', bf16_master_weights_and_grads=True)\nzero = 1\nparallel = dict(pipeline=2)\n"
    (found,) = findings(MODEL + text)
    hint = "optimizer.type='DeepSpeedCPUAdam' with zero.offload_optimizer='cpu'"
    assert (found.code, found.help) == ("PRE102", hint)
    assert findings(MODEL + text, overrides=[f"{key.strip()}" for key in hint.split(" with ")]) == []
