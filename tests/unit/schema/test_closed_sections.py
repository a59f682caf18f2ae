"""Every section and type is closed: lint finds an unknown key wherever it stands, and so does the code that runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dslpar.core.errors import Finding
from dslpar.linter.check import lint, load_text
from dslpar.schema import datasets, families, keys, sections
from dslpar.schema.torch_layers import LAYERS
from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS
from dslpar.schema.transformers_configs import table
from tests.support.lint import MODEL, codes, findings

KEY = "no_such_key"
OPEN_LAYERS = {"Identity"}
"""torch's own constructor accepts any arguments, and ignores them."""
OF_A_USER = ("model", "optimizer", "data", "gradient_handler")
"""Sections that may name a class of the author's. Lint does not import it, so only a run knows its arguments."""
LLAMA = "type='transformers.LlamaForCausalLM', config=dict(num_hidden_layers=1, max_position_embeddings=64)"
TABLES_OF_DEEPSPEED = ("flops_profiler", "aio", "comms_logger")


def typed_sections() -> Iterator[tuple[str, str]]:
    """Yield (section, value with the unknown key) for each section that has types."""
    for name in (*families.FAMILIES, "Sequential", "torch.nn.Linear"):
        yield "model", f"dict(type={name!r}, {KEY}=1)"
    for name in [*table()["models"], "NotInTheTable"]:
        yield "model", f"dict(type='transformers.{name}', {KEY}=1)"
    for more in (f"{KEY}=1", f"lora=dict({KEY}=1)", f"policy=dict({KEY}=1)"):
        yield "model", f"dict({LLAMA}, {more})"
    yield "model", f"dict(type='transformers.LlamaForCausalLM', config=dict({KEY}=1))"
    for name in sorted({*LAYERS} - OPEN_LAYERS):
        yield "model", f"dict(type='Sequential', layers_cfg=[dict(type={name!r}, {KEY}=1)])"
    for name in datasets.DATASETS:
        yield "data", f"dict(type={name!r}, {KEY}=1)"
    for name in sorted({*datasets.DATASETS} - {"blend"}):
        yield "data", f"dict(type='blend', parts=[dict(type={name!r}, {KEY}=1)])"
    for name in (*sections.OPTIMIZERS, *(name for name, row in OPTIMIZERS.items() if not row.refused)):
        yield "optimizer", f"dict(type={name!r}, {KEY}=1)"
    for name in (*sections.LR_SCHEDULERS, *(name for name, row in LR_SCHEDULERS.items() if not row.refused)):
        yield "lr_scheduler", f"dict(type={name!r}, {KEY}=1)"
    for name in TABLES_OF_DEEPSPEED:
        yield "deepspeed", f"dict({name}=dict({KEY}=1))"
    yield from (("precision", f"dict(dtype={name!r}, {KEY}=1)") for name in ("fp32", "bf16", "fp16"))
    yield from ((f"zero.offload_{name}", f"dict(device='cpu', {KEY}=1)") for name in ("optimizer", "param"))


def plain_sections() -> list[str]:
    """Return the dotted keys of all sections without types."""
    owners = {each.key.rpartition(".")[0] for each in keys.declared()}
    return sorted(name for name in owners if name and name.partition(".")[0] not in (*OF_A_USER, "lr_scheduler"))


CASES = [*typed_sections(), *((name, f"dict({KEY}=1)") for name in plain_sections())]


def about_the_key(section: str, value: str) -> list[Finding]:
    config = load_text("" if section == "model" else MODEL, "cfg.py", [f"{section}={value}"])
    return [each for each in lint(config, 8) if KEY in each.message or KEY in each.key]


def test_no_section_and_no_type_is_open() -> None:
    """One test for all cases: each takes some milliseconds, and there are hundreds."""
    is_open = [case for case in CASES if [each.severity for each in about_the_key(*case)].count("error") != 1]
    assert is_open == []
    assert len(CASES) > 280
    assert {section.partition(".")[0] for section, _ in CASES} == {*sections.Spec.__dataclass_fields__} - {
        "gradient_handler"
    }


@pytest.mark.parametrize(
    ("key", "help", "fix"),
    [
        ("attn_implementaton='sdpa'", "did you mean 'attn_implementation'?", "attn_implementation"),
        ("lorra=dict(r=8)", "did you mean 'lora'?", "lora"),
        ("pretrain='folder'", "did you mean 'pretrained'?", "pretrained"),
        ("torch_dtype='bfloat16'", "here that is precision", None),
        ("dtype='bfloat16'", "here that is precision", None),
        ("hidden_size=64", "write it into config: config=dict(hidden_size=64)", None),
        ("rope_theta=10000.0", "write it into config: config=dict(rope_theta=10000.0)", None),
        ("model_name_or_path='folder'", "here that is model.pretrained", None),
        ("use_flash_attention_2=True", "here that is model.attn_implementation", None),
        ("layers_cfg=[]", "choose from the keys type, config, pretrained, lora, attn_implementation, policy", None),
        ("target='x'", "choose from the keys type, config, pretrained, lora, attn_implementation, policy", None),
    ],
)
def test_a_key_beside_the_config_of_a_transformers_model(key: str, help: str, fix: str | None) -> None:
    (found,) = findings(f"model = dict({LLAMA}, {key})\n")
    assert (found.code, found.help, found.fix.text if found.fix else None) == ("CFG101", help, fix)


def test_sizes_without_a_config_are_one_finding_each_and_nothing_else() -> None:
    sizes = ("num_hidden_layers=2", "hidden_size=64", "vocab_size=256")
    found = findings(f"model = dict(type='transformers.MistralForCausalLM', {', '.join(sizes)})\n", 1)
    assert [each.help for each in found] == [f"write it into config: config=dict({size})" for size in sizes]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("type='transformers.LlamaForCausalLM'", "CFG104", "missing key 'config' in model"),
        ("type='transformers.LlamaForCausalLM', config='folder'", "CFG102", "model.config is 'folder'"),
        ("type='transformers.LlamaForCausalLM', pretrained=3", "CFG102", "model.pretrained is 3"),
        (
            "type='transformers.AutoModelForCausalLM', pretrained='folder'",
            "CFG108",
            "AutoModelForCausalLM is a factory",
        ),
        (f"{LLAMA}, attn_implementation='eager'", "CFG108", "model.attn_implementation cannot be 'eager'"),
        (f"{LLAMA}, attn_implementation='flash'", "CFG108", "unknown model.attn_implementation 'flash'"),
    ],
)
def test_a_wrong_value_of_a_transformers_model(arguments: str, code: str, message: str) -> None:
    found = [each for each in findings(f"model = dict({arguments})\n", 1) if each.code != "CKP102"]
    assert [each.code for each in found] == [code]
    assert found[0].message.startswith(message)


FLASH = ", attn_implementation='flash_attention_2'"


@pytest.mark.parametrize(
    ("arguments", "parallel", "said"),
    [
        (LLAMA + FLASH, "", ""),
        (LLAMA + FLASH, "parallel = dict(tensor=dict(size=8, mode='3d'))\nbatch = dict(micro_size=4)", ""),
        (LLAMA + FLASH, "parallel = dict(context=2)", "sequences are split"),
        (LLAMA + FLASH, "parallel = dict(tensor=dict(size=2, mode='sequence'))", "sequences are split"),
        (LLAMA.replace("Llama", "Gemma2") + FLASH, "", "caps its scores"),
        (LLAMA.replace("Llama", "GptOss") + FLASH, "", "attends with sinks"),
        ("type='transformers.BloomForCausalLM', config=dict(n_layer=1)" + FLASH, "", "computes its scores itself"),
        (LLAMA.replace("64)", "64, attn_implementation='eager')"), "", "torch's attention kernels only"),
        (LLAMA.replace("64)", "64, attn_implementation='sdpa')"), "", ""),
    ],
)
def test_a_kernel_that_cannot_compute_the_attention_is_refused(arguments: str, parallel: str, said: str) -> None:
    found = [each for each in findings(f"model = dict({arguments})\n{parallel}\n", 8) if each.code == "TEN137"]
    assert len(found) == bool(said)
    assert all(said in each.message and "attn_implementation='sdpa'" in each.help for each in found)


def test_a_kernel_that_is_named_twice_is_one_too_many() -> None:
    inner = LLAMA.replace("64)", "64, attn_implementation='sdpa')")
    (found,) = findings(f"model = dict({inner}, attn_implementation='flash_attention_2')\n", 1)
    assert (found.code, found.help) == ("CFG110", "leave model.config.attn_implementation out")


def test_a_data_type_in_the_config_changes_nothing() -> None:
    assert "DEAD129" in codes(f"model = dict({LLAMA.replace('64)', '64, torch_dtype=' + repr('bfloat16') + ')')})\n", 1)
