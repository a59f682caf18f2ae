"""Lint of `deepspeed`: misspelt keys at every depth, types, nesting, and values that DeepSpeed rejects."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from dslpar.core.errors import Finding
from dslpar.linter.check import lint, load_text
from dslpar.schema import deepspeed_policy
from dslpar.schema.deepspeed_policy import KEYS
from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS
from tests.support.lint import MODEL, PATH, marked


def errors(text: str, world: int = 8) -> list[Finding]:
    """Return the errors of a config with this text and a model."""
    return [found for found in lint(load_text(MODEL + text, PATH), world) if found.severity == "error"]


# Misspelt, at every depth ------------------------------------------------------------------------------------------


def places() -> Iterator[tuple[str, str]]:
    """Yield a config with {} in place of a key and its value, and the key, for every key of every section."""
    offload = "zero = dict(stage=3, offload_{}=dict(device='cpu', {{}}))"
    yield from (("zero = dict({})", name) for name in deepspeed_policy.ZERO)
    yield from ((offload.format("optimizer"), name) for name in deepspeed_policy.OFFLOAD_OPTIMIZER)
    yield from ((offload.format("param"), name) for name in deepspeed_policy.OFFLOAD_PARAM)
    yield from (("zero = dict(stage=3, leaf_module=dict({}))", name) for name in deepspeed_policy.LEAF_MODULE)
    for dtype, known in (("bf16", deepspeed_policy.BF16), ("fp16", deepspeed_policy.FP16)):
        yield from ((f"zero = 1\nprecision = dict(dtype='{dtype}', {{}})", name) for name in known)
    for section, rows in (("optimizer", OPTIMIZERS), ("lr_scheduler", LR_SCHEDULERS)):
        for type_, row in rows.items():  # type: ignore[attr-defined]
            yield from ((f"{section} = dict(type='{type_}', {{}})", name) for name in row.args if not row.refused)
    yield from (("deepspeed = dict({})", name) for name in deepspeed_policy.TOP)
    for path in (path for path in KEYS if path.partition(".")[0] in deepspeed_policy.TOP):
        nested = "".join(f"{name}=dict(" for name in path.split("."))
        yield from ((f"deepspeed = dict({nested}{{}}){')' * len(path.split('.'))}", name) for name in KEYS[path])


def misspelt(name: str) -> str:
    """Swap two letters in the middle."""
    at = next(at for at in range(len(name) // 2, 0, -1) if name[at] != name[at - 1])
    return name[: at - 1] + name[at] + name[at - 1] + name[at + 1 :]


def test_every_misspelt_key_gets_a_did_you_mean() -> None:
    missed = []
    for config, name in places():
        if len(name) < 4:
            continue  # t0, rho: too short to resemble anything
        text = config.format(f"{misspelt(name)}=1") + "\n"
        told = [found for found in errors(text) if found.code in ("CFG101", "DSC101")]
        close = [found for found in told if f"did you mean {name!r}?" in found.help]
        if not close or marked(MODEL + text, close[0]) != misspelt(name):
            missed.append((text, [found.concise() for found in told]))
    assert missed == []


def test_many_keys_are_misspelt() -> None:
    assert len(list(places())) > 200


RESEMBLES_ANOTHER = [
    ("train_bach_size=16", "write it under batch.global_size (if 'train_batch_size' is meant)"),
    ("zero_optimisation=dict(stage=1)", "write it under zero (if 'zero_optimization' is meant)"),
    ("elasticty=dict()", "leave it out: 'elasticity', if that is meant, is one that DeepSpeed has removed"),
    ("hybrid_engin=dict()", "leave it out: 'hybrid_engine', if that is meant, is one that dslpar does not support"),
]


@pytest.mark.parametrize(("key", "words"), RESEMBLES_ANOTHER)
def test_a_misspelt_unsupported_key_gets_both_reasons(key: str, words: str) -> None:
    (found,) = errors(f"deepspeed = dict({key})\n")
    assert found.code == "DSC101"
    assert found.help.startswith(words)
    assert found.fix is None


# Of a wrong type ---------------------------------------------------------------------------------------------------

VALUES = [
    ("steps_per_print=0", "0", "at least 1"),
    ("wall_clock_breakdown='false'", "'false'", "True or False"),
    ("communication_data_type='fp8'", "'fp8'", "communication_data_type 'fp8'"),
    ("log_level='loud'", "'loud'", "one of 'debug'"),
    ("gradient_predivide_factor=0", "0", "above 0"),
    ("flops_profiler=True", "True", "a dict"),
    ("flops_profiler=dict(profile_step=0)", "0", "at least 1"),
    ("flops_profiler=dict(module_depth=-2)", "-2", "-1 for all"),
    ("flops_profiler=dict(output_file='')", "''", "a string"),
    ("comms_logger=dict(prof_ops='all_reduce')", "'all_reduce'", "a list of strings"),
    ("timers=dict(throughput=dict(enabled='no'))", "'no'", "True or False"),
    ("timers=dict(throughput=True)", "True", "a dict"),
    ("aio=dict(block_size=1e6)", "1e6", "a whole number"),
]


@pytest.mark.parametrize(("key", "mark", "words"), VALUES)
def test_a_wrong_value_is_marked_and_its_type_named(key: str, mark: str, words: str) -> None:
    text = f"deepspeed = dict({key})\n"
    (found,) = errors(text)
    assert found.code == "DSC105"
    assert marked(MODEL + text, found) == mark
    assert words in found.message + found.help


def test_none_counts_as_left_out() -> None:
    assert errors("deepspeed = dict(steps_per_print=None, flops_profiler=dict(output_file=None), aio=None)\n") == []


def test_all_mistakes_are_reported_at_once() -> None:
    text = "deepspeed = dict(aio=dict(queue_dept=1, block_size='x'), bf16=dict(), amp=dict(), comet=dict(), x=1)\n"
    assert sorted(found.code for found in errors(text)) == ["DSC101", "DSC101", "DSC102", "DSC103", "DSC104", "DSC105"]


# As DeepSpeed has it -----------------------------------------------------------------------------------------------

NESTINGS = [
    ("zero = dict(zero_optimization=dict(stage=1))", "CFG101", "zero = dict(stage=1, ...)"),
    ("zero = dict(stage=1, bf16=dict(enabled=True))", "CFG101", "leave it out, and write precision='bf16'"),
    ("zero = dict(stage=1, gradient_clipping=1.0)", "CFG101", "write it under train.clip_grad_norm"),
    ("zero = dict(stage=1, prescale_gradients=True)", "CFG101", "write it under deepspeed.prescale_gradients"),
    ("zero = dict(stage=3, prefetch_bucket_size=9)", "DSC106", "write it under zero.stage3_prefetch_bucket_size"),
    ("zero = dict(stage=3, mics_shard_size=2)", "DSC103", "leave it out"),
    ("zero = dict(stage=2, zenflow=dict(topk_ratio=0.1))", "DSC104", "leave it out"),
    ("zero = dict(stage=2, cpu_offload=True)", "DSC106", "offload_optimizer='cpu'"),
    ("optimizer = dict(type='AdamW', params=dict(lr=1e-3))", "CFG101", "leave params out, and add lr=... to optimizer"),
    ("lr_scheduler = dict(type='WarmupLR', params=dict())", "CFG101", "leave params out, and add warmup_num_steps=..."),
    ("precision = dict(bf16=dict(enabled=True))", "CFG101", "precision.dtype='bf16' with zero.stage=1"),
    ("zero = 1\nprecision = dict(enabled=True)", "CFG101", "precision.dtype='bf16'"),
]


@pytest.mark.parametrize(("text", "code", "words"), NESTINGS)
def test_keys_in_deepspeeds_nesting_get_the_key_to_write(text: str, code: str, words: str) -> None:
    (found,) = errors(text + "\n")
    assert found.code == code
    assert words in found.help


@pytest.mark.parametrize("name", deepspeed_policy._INSTEAD)
def test_the_new_name_of_a_deprecated_key_is_accepted(name: str) -> None:
    instead = deepspeed_policy._INSTEAD[name]
    assert errors(f"zero = dict(stage=3, {instead})\n") == []


# Together ----------------------------------------------------------------------------------------------------------

CPU_ADAM = "optimizer = dict(type='DeepSpeedCPUAdam', lr=1e-3)\n"
STATES = "precision = dict(dtype='bf16', bf16_master_weights_and_grads=True, bf16_optimizer_states=True)\n"
TOGETHER = [
    ("zero = 2\ndeepspeed = dict(prescale_gradients=True)", ["DSC107"]),
    ("zero = 3\ndeepspeed = dict(gradient_predivide_factor=2.0)", ["DSC107"]),
    ("zero = dict(stage=2, reduce_scatter=False)\ndeepspeed = dict(prescale_gradients=True)", []),
    ("zero = 1\ndeepspeed = dict(prescale_gradients=True)", []),
    ("zero = 1\ndeepspeed = dict(gradient_predivide_factor=2.0)", []),
    ("zero = 1\nparallel = dict(context=2)\ndeepspeed = dict(gradient_predivide_factor=2.0)", ["DSC107"]),
    ("zero = 1\nparallel = dict(context=2)\ndeepspeed = dict(prescale_gradients=True)", []),
    ("zero = 2\ndeepspeed = dict(gradient_predivide_factor=1.0)", []),
    ("zero = 2\ndeepspeed = dict(prescale_gradients='x')", ["DSC105"]),
    ("zero = 1\ndeepspeed = dict(zero_allow_untested_optimizer=False)", []),  # AdamW is on its list
    ("zero = 1\noptimizer = dict(type='SGD')\ndeepspeed = dict(zero_allow_untested_optimizer=False)", ["DSC108"]),
    ("zero = 1\noptimizer = dict(type='Adagrad')\ndeepspeed = dict(zero_allow_untested_optimizer=False)", ["DSC108"]),
    ("zero = 1\noptimizer = dict(type='RMSprop')\ndeepspeed = dict(zero_allow_untested_optimizer=True)", []),
    ("optimizer = dict(type='SGD')\ndeepspeed = dict(zero_allow_untested_optimizer=False)", []),
    ("zero = 1\noptimizer = dict(type='Lamb')\ndeepspeed = dict(zero_allow_untested_optimizer=False)", ["ZER103"]),
    ("zero = 1\noptimizer = dict(type='NAdam')\ndeepspeed = dict(zero_force_ds_cpu_optimizer=True)", []),
    (
        "zero = dict(stage=1, offload_optimizer='cpu')\noptimizer = dict(type='NAdam')\n"
        "deepspeed = dict(zero_force_ds_cpu_optimizer=True)",
        ["DSC108"],
    ),
    ("zero = dict(stage=1, offload_optimizer='cpu')\ndeepspeed = dict(zero_force_ds_cpu_optimizer=True)", []),
    ("deepspeed = dict(aio=dict(use_gds=True))", ["DSC109"]),
    ("deepspeed = dict(aio=dict(use_gds=False))", []),
    ("zero = dict(stage=2, legacy_stage1=True)", ["ZER108"]),
    ("zero = dict(stage=3, elastic_checkpoint=True)", ["ZER108"]),
    ("zero = dict(stage=2, elastic_checkpoint=True)", []),
    ("zero = dict(stage=2, allgather_bucket_size=7)", ["ZER108"]),
    ("zero = dict(stage=3, allgather_bucket_size=7)", []),
    ("zero = dict(stage=1, allgather_bucket_size=7)\nprecision = 'fp16'", ["ZER108"]),
    (
        "zero = dict(stage=1, allgather_bucket_size=7)\nprecision = 'bf16'",
        ["ZER108"],
    ),  # with half-precision masters DeepSpeed accepts the same optimizer
    ("zero = dict(stage=1, allgather_bucket_size=7, offload_optimizer='cpu')\nprecision = 'bf16'", ["ZER108"]),
    ("zero = dict(stage=3, zero_quantized_gradients=True, reduce_scatter=False)", ["ZER108"]),
    ("zero = dict(stage=3, zero_hpz_partition_size=3)", ["ZER109"]),
    ("zero = dict(stage=3, zero_hpz_partition_size=4)", []),
    ("zero = dict(stage=3, zero_hpz_partition_size=99)", []),  # DeepSpeed uses the world size
    ("zero = dict(stage=2, zero_hpz_partition_size=3)", []),
    ("zero = dict(stage=3, zero_hpz_partition_size=2)\nparallel = dict(tensor=dict(size=2, mode='1d'))", ["ZER109"]),
    ("zero = 3\ntrain = dict(compile=True)", ["ZER110"]),
    ("zero = 3\ntrain = dict(compile=True, compile_components=['loss'])", []),
    ("zero = 3\ntrain = dict(compile=False)", []),
    ("zero = 2\ntrain = dict(compile=True)", []),
    (STATES + CPU_ADAM + "zero = dict(stage=2, offload_optimizer='cpu')", ["PRE103"]),
    (STATES + "zero = dict(stage=2)", []),
    ("zero = 1\nprecision = dict(dtype='fp16', initial_scale_power=62)", []),
    ("zero = 1\nprecision = dict(dtype='fp16', initial_scale_power=63)", ["CFG103"]),  # torch: int too big to convert
    ("zero = 1\nprecision = dict(dtype='fp16', loss_scale_window=0)", ["CFG103"]),
    ("zero = dict(stage=1, reduce_bucket_size=0)", ["CFG103"]),
]


@pytest.mark.parametrize(("text", "codes"), TOGETHER)
def test_values_that_deepspeed_rejects_together(text: str, codes: list[str]) -> None:
    assert [found.code for found in errors(text + "\n")] == codes


# The list costs nothing where it is not needed ---------------------------------------------------------------------


@pytest.mark.parametrize(("section", "needed"), [("zero = dict(stage=1)", False), ("zero = dict(stag=1)", True)])
def test_the_list_is_imported_only_where_it_is_needed(section: str, needed: bool) -> None:
    code = f"import sys; from dslpar.linter import check; check.lint(check.load_text({MODEL + section!r}, 'c.py'), 8); "
    code += "print('dslpar.schema.deepspeed_policy' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(needed)
