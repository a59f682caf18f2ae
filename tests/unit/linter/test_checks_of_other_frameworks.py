"""Conditions that other frameworks check, or fail to, each by name: the codes that check it here, or why none does.

The list was gathered from the checks of Megatron-LM, Megatron-DeepSpeed, DeepSpeed, GPT-NeoX, nanotron, picotron,
torchtitan, LiBai, ColossalAI and accelerate, and from their users' issues. A line with a reason alone does not apply to
dslpar on DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dslpar.linter.registry import codes

EXPERTS = "no layer here has experts; their keys are unknown keys"
KERNELS = "a kernel or flag of Megatron-LM's; its key is an unknown key"

QUARRY: Mapping[str, tuple[str, str]] = {
    # sizes and the mesh
    "P01 world % (tensor * pipeline) == 0": ("PAR101", ""),
    "P02 world == data * tensor * pipeline when data is given": ("PAR103", ""),
    "P03 experts' mesh": ("CFG101", EXPERTS),
    "P04 sizes are whole numbers from 1, and no bools": ("CFG102 CFG103", ""),
    "P05 nothing is clamped to the world": ("PAR102", ""),
    "P06 heads % tensor": ("TEN201", ""),
    "P07 kv heads % tensor": ("TEN206 TEN207 TEN208", "none are replicated, so a divisor is no way out"),
    "P08 hidden % heads": ("TEN205", ""),
    "P09 ffn % tensor": ("TEN203", "swiglu's gate and up are blocks of one weight, cut each by itself"),
    "P10 padded vocabulary": ("PERF107", "padding is stripped from whole weights, so that layouts stay exchangeable"),
    "P11 hidden % tensor": ("TEN202", ""),
    "P12 sequence parallelism needs tensor > 1": ("DEAD110", ""),
    "P13 sequence % tensor": ("TEN204", ""),
    "P14 sequence % (2 * context)": ("TEN204", "the ring here has one chunk a rank, so sequence % x is enough"),
    "P15 Ulysses: heads % (tensor * context)": ("TEN201 TEN206", ""),
    "P16 hierarchical context parallelism": ("CFG101", "there is none"),
    "P17 ring and Ulysses exclude each other": ("CFG108", "impl is one of the two, of one mode"),
    "P18 positions >= sequence": ("BAT103", ""),
    "P19 experts divide": ("CFG101", EXPERTS),
    "P20 experts with tensor parallelism": ("CFG101", EXPERTS),
    "P21 sizes of 2d, 2.5d and 3d": ("TEN103 TEN104 TEN105 TEN106 TEN107 TEN201 TEN202 BAT102", ""),
    # batch
    "B01 global == micro * accumulation * data": ("BAT101", ""),
    "B02 whole micro-batches": ("BAT101 BAT102", "an evaluation takes batches of the same size"),
    "B03 a schedule of batch sizes": ("CFG101", "there is none"),
    "B04 micro-batches against stages, bubble": ("PERF104 PERF105", ""),
    "B05 interleaved schedule": ("PIP112 CFG108", "it is refused, whatever its numbers"),
    # layers on stages
    "L01 layers % stages": ("PIP101 PIP107 PERF106", "layers need not divide: a cut says where each goes"),
    "L02 layers of virtual stages": ("PIP112", ""),
    "L03 one way to say the cut": ("PIP106", ""),
    "L04 first and last stage": ("PIP105 PIP107", ""),
    "L05 layout against counts": ("PIP106", ""),
    "L06 layout strings": ("CFG101", "there are none: stage_ids and counts say it"),
    "L07 stage ids": ("PIP102 PIP103 PIP104 PIP105", ""),
    "L08 no stage without parameters": ("PIP105 PIP113 PIP203", ""),
    "L09 imbalance over 15 %": ("PERF106", "by operations; memory is spread by method='parameters'"),
    "L10 type:REGEX matches layers": ("PIP109 PIP114", "only layers are matched, never helpers"),
    "L11 tied embedding over stages": (
        "",
        "the copies are one shard each, summed once a step; untied is another model",
    ),
    "L12 stages of their own for embedding and loss": ("CFG101", "there are none"),
    # ZeRO
    "Z01 ZeRO 2 and 3 with a pipeline": ("ZER101", ""),
    "Z02 ZeRO with tensor parallelism": ("", "layers are dslpar's own, and go with every stage; tests hold them equal"),
    "Z03 ZeRO over one data rank": ("DEAD115", ""),
    "Z04 gradients in bf16 add up in fp32": ("DSC102", "always so here; data_types is refused"),
    "Z05 ZeRO with experts": ("CFG101", EXPERTS),
    "Z06 torch's FSDP": ("CFG101", "DeepSpeed shards"),
    "Z07 overlapped gathers": ("CFG101", KERNELS),
    "Z08 offload": ("ZER104 ZER105 ZER107", ""),
    # precision
    "D01 one precision": ("CFG108 DSC102", "fp8 and fp4 are no choices"),
    "D02 dtypes of a pipeline": ("CFG101", "they follow from precision; losses are in fp32"),
    "D03 fp32 accumulation": ("DSC102 DEAD104", "always so here"),
    # recomputing
    "R01 granularity and method": ("CFG102 CFG103 PERF102", ""),
    "R02 distributed saved activations": ("DSC102", "there are none"),
    "R03 interval": ("CFG103 PERF102", ""),
    # hosts
    "E01 CUDA_DEVICE_MAX_CONNECTIONS": ("", "it orders kernels of Megatron-LM's overlap, which there is none of here"),
    "E02 tensor groups inside a host": ("PERF101", ""),
    "E03 hosts, slots and world agree": ("HST105 HST103 HST104 PAR102", ""),
    # the run
    "T01 steps or samples": ("CFG101", "a run is counted in steps alone"),
    "T02 rates and intervals": ("BAT106 DEAD105 DEAD113 CFG101", ""),
    "T03 one source of data": ("CFG101 BAT201", "there are no blends"),
    "T04 removed and renamed keys": ("CFG101 CFG105 CFG106 CFG121 DSC103", ""),
    "K01 checkpoints that cannot be resharded": ("", "checkpoints are DeepSpeed's, one format"),
    "K02 resume against what was stored": ("CKP202", ""),
    "C01 unknown keys": ("CFG101 CFG105 CFG106 DSC101", ""),
    "C02 YAML's traps": ("CFG102 CFG012", ""),
    "C03 keys without effect": (
        "DEAD101 DEAD102 DEAD103 DEAD104 DEAD105 DEAD106 DEAD107 DEAD108 DEAD109 DEAD110 DEAD111 DEAD112 DEAD113"
        " DEAD114 DEAD115 DEAD116 DEAD117 DEAD118 TEN108",
        "",
    ),
    # measured or read of ColossalAI, LiBai and DeepSpeed
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
    "evaluation interval above steps": ("DEAD113", ""),
    "metric that the evaluator does not produce": ("CFG101", "no key names a metric"),
    "micro-batches not a multiple of stages, interleaved": ("PIP112 CFG108", ""),
}


@pytest.mark.parametrize("condition", QUARRY)
def test_each_condition_has_its_codes_or_a_reason(condition: str) -> None:
    named, reason = QUARRY[condition]
    assert named or reason
    assert set(named.split()) <= set(codes())


def test_every_line_of_the_list_is_here_once() -> None:
    ids = [condition.split()[0] for condition in QUARRY if condition[1:3].isdigit()]
    counts = {"P": 21, "B": 5, "L": 12, "Z": 8, "D": 3, "R": 3, "E": 3, "T": 4, "K": 2, "C": 3}
    assert ids == [f"{family}{number:02}" for family, count in counts.items() for number in range(1, count + 1)]
    assert len(QUARRY) - len(ids) == 18


def test_keys_called_unknown_are_unknown() -> None:
    """Keys that a reason calls unknown are so."""
    from tests.support.lint import MODEL
    from tests.support.lint import codes as told

    for line in (
        "model.num_experts = 8",
        "parallel = dict(expert=2)",
        "batch = dict(rampup_batch_size=[16, 16, 100])",
        "train = dict(train_samples=1000)",
        "parallel = dict(pipeline=dict(size=2, layout='E|t*8|L'))",
        "train = dict(best_metric='acc')",
        "data = dict(blend=[1.0])",
    ):
        assert told(f"{MODEL}{line}\n") == ["CFG101"], line
    assert told(MODEL + "precision = 'fp8'\n") == ["CFG108"]
    assert told(MODEL + "deepspeed = dict(data_types=dict(grad_accum_dtype='bf16'))\n") == ["DSC102"]
