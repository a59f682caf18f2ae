"""DeepSpeed keys that lint refuses: deepspeed.initialize refuses them too, and accepts the suggested ones."""

from __future__ import annotations

import pytest

from tests.support.oracle.real import Verdict, judge
from tests.support.oracle.sample import Case

MODEL = "model = dict(type='GPT', num_layers=2, hidden_size=16, num_heads=2, vocab_size=256, max_seq_len=8)\n"
WORLD = 4
SGD = "optimizer = dict(type='SGD', lr=0.1)\n"
NADAM = "optimizer = dict(type='NAdam', lr=0.1)\n"

# a config, the config that its help suggests, the code, and DeepSpeed's error
REFUSED = [
    (
        "zero = 2\ndeepspeed = dict(prescale_gradients=True)",
        "zero = 1\ndeepspeed = dict(prescale_gradients=True)",
        "DSC107",
        "pre-scale gradients is not yet supported",
    ),
    (
        "zero = 3\ndeepspeed = dict(gradient_predivide_factor=2.0)",
        "zero = dict(stage=3, reduce_scatter=False)\ndeepspeed = dict(gradient_predivide_factor=2.0)",
        "DSC107",
        "gradient_predivide_factor != 1.0 is not yet supported",
    ),
    (
        SGD + "zero = 1\ndeepspeed = dict(zero_allow_untested_optimizer=False)",
        SGD + "zero = 1",
        "DSC108",
        "untested ZeRO Optimizer",
    ),
    (
        NADAM + "zero = dict(stage=1, offload_optimizer='cpu')\ndeepspeed = dict(zero_force_ds_cpu_optimizer=True)",
        NADAM + "zero = dict(stage=1, offload_optimizer='cpu')",
        "DSC108",
        "ZeRO-Offload with a client provided optimizer",
    ),
    ("deepspeed = dict(aio=dict(use_gds=True))", "deepspeed = dict(aio=dict(use_gds=False))", "DSC109", "GDS"),
    ("zero = dict(stage=2, legacy_stage1=True)", "zero = 2", "ZER108", "ZeRO Stage 1 is not supported"),
    (
        "zero = dict(stage=1, allgather_bucket_size=999)",
        "zero = dict(stage=1, allgather_bucket_size=1000)",
        "ZER108",
        "allgather_bucket_size must be a multiple",
    ),
    (
        "zero = dict(stage=3, zero_hpz_partition_size=3)",
        "zero = dict(stage=3, zero_hpz_partition_size=2)",
        "ZER109",
        "not divisible",
    ),
]


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    """Return for each case the verdict on the refused config, then on the suggested one."""
    texts = [text for refused, instead, _, _ in REFUSED for text in (refused, instead)]
    return judge([Case(index, MODEL + text + "\n", WORLD, (0,), "") for index, text in enumerate(texts)])


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=[f"{code}-{text}" for text, _, code, _ in REFUSED])
def test_deepspeed_refuses_what_lint_refuses(verdicts: list[Verdict], index: int) -> None:
    _, _, code, words = REFUSED[index]
    refused, instead = verdicts[2 * index : 2 * index + 2]
    assert refused.codes == {code}
    assert words in refused.built[0].said
    assert instead.passes
    assert instead.accepted, instead.built
