"""Conditions that other frameworks check, or fail to: the codes that check each here, or why none does.

The list comes from the checks of Megatron-LM, Megatron-DeepSpeed, DeepSpeed, GPT-NeoX, nanotron, picotron, torchtitan,
LiBai, ColossalAI and accelerate, and from their users' issues. A line with only a reason does not apply to dslpar on
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dslpar.linter.registry import codes

KERNELS = "a kernel or flag of Megatron-LM's; its key is an unknown key"

CHECKS: Mapping[str, tuple[str, str]] = {
    # sizes and the mesh
    "world % (tensor * pipeline) == 0": ("PAR101", ""),
    "world == data * tensor * pipeline when data is given": ("PAR103", ""),
    "experts' mesh": ("PAR105", ""),
    "sizes are whole numbers from 1, and no bools": ("CFG102 CFG103", ""),
    "nothing is clamped to the world": ("PAR102", ""),
    "heads % tensor": ("TEN201", ""),
    "kv heads % tensor": ("TEN206 TEN207 TEN208", "none are replicated, so a divisor is no way out"),
    "hidden % heads": ("TEN205", ""),
    "ffn % tensor": ("TEN203", "swiglu's gate and up are blocks of one weight, cut each by itself"),
    "padded vocabulary": ("PERF107", "padding is stripped from whole weights, so that layouts stay exchangeable"),
    "hidden % tensor": ("TEN202", ""),
    "sequence parallelism needs tensor > 1": ("DEAD110", ""),
    "sequence % tensor": ("TEN204", ""),
    "sequence % (2 * context)": ("TEN204", "the ring here has one chunk a rank, so sequence % x is enough"),
    "Ulysses: heads % (tensor * context)": ("TEN201 TEN206", ""),
    "hierarchical context parallelism": ("CFG101", "there is none"),
    "ring and Ulysses exclude each other": ("CFG108", "impl is one of the two, of one mode"),
    "positions >= sequence": ("BAT103", ""),
    "experts divide": ("PERF110", "they need not: places stay empty"),
    "experts with tensor parallelism": ("PAR105", "whole tensor groups share the experts"),
    "sizes of 2d, 2.5d and 3d": ("TEN103 TEN104 TEN105 TEN106 TEN107 TEN201 TEN202 BAT102", ""),
    # batch
    "global == micro * accumulation * data": ("BAT101", ""),
    "whole micro-batches": ("BAT101 BAT102", "an evaluation takes batches of the same size"),
    "a schedule of batch sizes": ("CFG101", "there is none"),
    "micro-batches against stages, bubble": ("PERF104 PERF105", ""),
    "interleaved schedule": ("PIP112 PIP115 PIP101", ""),
    # layers on stages
    "layers % stages": ("PIP101 PIP107 PERF106", "layers need not divide: a cut says where each goes"),
    "layers of virtual stages": ("PIP101", ""),
    "one way to say the cut": ("PIP106", ""),
    "first and last stage": ("PIP105 PIP107", ""),
    "layout against counts": ("PIP106", ""),
    "layout strings": ("CFG101", "there are none: stage_ids and counts say it"),
    "stage ids": ("PIP102 PIP103 PIP104 PIP105", ""),
    "no stage without parameters": ("PIP105 PIP113 PIP203", ""),
    "imbalance over 15 %": ("PERF106", "by operations; memory is spread by method='parameters'"),
    "type:REGEX matches layers": ("PIP109 PIP114", "only layers are matched, never helpers"),
    "tied embedding over stages": (
        "",
        "the copies are one shard each, summed once a step; untied is another model",
    ),
    "stages of their own for embedding and loss": ("CFG101", "there are none"),
    # ZeRO
    "ZeRO 2 and 3 with a pipeline": ("ZER101", ""),
    "ZeRO with tensor parallelism": ("", "layers are dslpar's own, and go with every stage; tests hold them equal"),
    "ZeRO over one data rank": ("DEAD115", ""),
    "gradients in bf16 add up in fp32": ("DSC102", "always so here; data_types is refused"),
    "ZeRO with experts": ("ZER111 ZER112", ""),
    "torch's FSDP": ("CFG101", "DeepSpeed shards"),
    "overlapped gathers": ("DEAD120", "opt-in: zero.overlap_param_gather"),
    "offload": ("ZER104 ZER105 ZER107", ""),
    # precision
    "one precision": ("CFG108 DSC102", "fp8 and fp4 are no choices"),
    "dtypes of a pipeline": ("CFG101", "they follow from precision; losses are in fp32"),
    "fp32 accumulation": ("DSC102 DEAD104", "always so here"),
    # recomputing
    "granularity and method": ("CFG102 CFG103 PERF102", ""),
    "distributed saved activations": ("DSC102", "there are none"),
    "interval": ("CFG103 PERF102", ""),
    # hosts
    "CUDA_DEVICE_MAX_CONNECTIONS": ("", "it orders kernels of Megatron-LM's overlap, which there is none of here"),
    "tensor groups inside a host": ("PERF101", ""),
    "hosts, slots and world agree": ("HST105 HST103 HST104 PAR102", ""),
    # the run
    "steps or samples": ("CFG101", "a run is counted in steps alone"),
    "rates and intervals": ("BAT106 DEAD105 DEAD113 CFG101", ""),
    "one source of data": ("CFG101 BAT201", "there are no blends"),
    "removed and renamed keys": ("CFG101 CFG105 CFG106 CFG121 DSC103", ""),
    "checkpoints that cannot be resharded": ("", "checkpoints are DeepSpeed's, one format"),
    "resume against what was stored": ("CKP202", ""),
    "unknown keys": ("CFG101 CFG105 CFG106 DSC101", ""),
    "YAML's traps": ("CFG102 CFG012", ""),
    "keys without effect": (
        "DEAD101 DEAD102 DEAD103 DEAD104 DEAD105 DEAD106 DEAD107 DEAD108 DEAD109 DEAD110 DEAD111 DEAD112 DEAD113"
        " DEAD114 DEAD115 DEAD116 DEAD117 DEAD118 DEAD120 DEAD121 DEAD124 DEAD125 DEAD126 DEAD127 TEN108",
        "",
    ),
    # measured in, or read from, ColossalAI, LiBai and DeepSpeed
    "tensor size > 1 without a mode": ("TEN101", ""),
    "data unlike world / (pipeline * tensor)": ("PAR103", ""),
    "sequence mode: sequence and heads": ("TEN204 TEN201", ""),
    "divisors of every mode": ("BAT102 TEN201 TEN202 TEN203 TEN204 TEN205 TEN206 TEN207 TEN208 TEN209", ""),
    "break-even with 1d": ("PERF103", ""),
    "tensor group larger than a host": ("PERF101", ""),
    "use_multi_rank_bucket_allreduce": ("PERF108", "False is written where nobody says otherwise"),
    "gradient_clipping left out of a raw section": ("DSC102", "0.0 is written where train.clip_grad_norm is left out"),
    "ZeRO 2 with accumulation": ("PERF109", ""),
    "a stage list while the pipeline has one stage": ("DEAD101", ""),
    "pipeline_num_layers unlike the model's": ("PIP108", ""),
    "stage list bounded by the world, empty stages, decreasing ids": ("PIP103 PIP104 PIP105", ""),
    "a section replaced by a shorter dict": ("CFG120", ""),
    "warm-up longer than the run": ("BAT105", ""),
    "min lr above lr": ("BAT106", ""),
    "lr_decay_iters beside the run's steps and the warm-up": ("BAT126 BAT127", ""),
    "evaluation interval above steps": ("DEAD113", ""),
    "metric that the evaluator does not produce": ("CFG101", "no key names a metric"),
    "micro-batches not a multiple of stages, interleaved": ("PIP115", ""),
}


@pytest.mark.parametrize("condition", CHECKS)
def test_each_condition_has_its_codes_or_a_reason(condition: str) -> None:
    named, reason = CHECKS[condition]
    assert named or reason
    assert set(named.split()) <= set(codes())


def test_checks_are_listed_once() -> None:
    """83 conditions were gathered; a duplicate would replace the other in the dict."""
    assert len(CHECKS) == 83


def test_keys_called_unknown_are_unknown() -> None:
    """Keys that a reason calls unknown are unknown."""
    from tests.support.lint import MODEL
    from tests.support.lint import codes as told

    for line in (
        "model.num_experts = 8",
        "batch = dict(rampup_batch_size=[16, 16, 100])",
        "train = dict(train_samples=1000)",
        "parallel = dict(pipeline=dict(size=2, layout='E|t*8|L'))",
        "train = dict(best_metric='acc')",
        "data = dict(blend=[1.0])",
    ):
        assert told(f"{MODEL}{line}\n") == ["CFG101"], line
    assert told(MODEL + "precision = 'fp8'\n") == ["CFG108"]
    assert told(MODEL + "deepspeed = dict(data_types=dict(grad_accum_dtype='bf16'))\n") == ["DSC102"]
