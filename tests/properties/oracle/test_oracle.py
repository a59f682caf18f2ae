"""Random configs through lint and DeepSpeed: what lint passes, DeepSpeed accepts, and the reverse.

For each config that lint passes, rank 0 and another rank of its world are built up to deepspeed.initialize, and take
one step if no data must come from a neighbour. Configs that lint refuses are built anyway. If DeepSpeed accepts one,
`reasons.REASONS` has lint's reason.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache

import pytest

from dslpar.core.errors import DslparError, has_errors
from dslpar.layout.modes import MODES
from dslpar.linter import check as linter_check
from dslpar.models.gpt import section
from dslpar.schema import deepspeed_policy, sections_reader
from dslpar.schema import sections as spec
from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS
from tests.properties.oracle.reasons import BESIDE_OTHERS, REASONS
from tests.support.oracle.real import Verdict, config_of, forced_job, judge
from tests.support.oracle.sample import Case, sample

ALL = 1_000
PARTS = 8
IN_TEST = 50
COMPILED = {"DeepSpeedCPUAdam": "CPUAdamBuilder", "FusedAdam": "FusedAdamBuilder", "FusedLion": "CPULionBuilder"}
"""Optimizers that DeepSpeed compiles at their first use on a CPU, for half a minute, and their builders."""
ANNOUNCED = {"CFG111", "PIP110"}
"""Infos for a class that is not known before it is built, and is checked then."""
MACHINE = ("not been implemented on CPU backend", "must be on supported devices: ['cuda'")
"""Errors that no linter can know: some optimizers of DeepSpeed, and torch's capturable ones, need a GPU."""
IMPORTED = ("'tests.support.oracle.models.Module' is not a gradient handler",)
"""Errors that need the class to be imported, which lint never does."""


def false_passes(verdicts: Iterable[Verdict]) -> list[str]:
    """Return configs that lint passes and the real path refuses, each in full."""
    return [
        f"sample({verdict.case.seed}), world {verdict.case.world}: {built.by}: {built.said}\n"
        f"{verdict.case.text}{built.where}"
        for verdict in verdicts
        for built in verdict.built
        if verdict.passes and not built.accepted and not expected(verdict, built.by, built.said)
    ]


def expected(verdict: Verdict, by: str, said: str) -> bool:
    """Return whether lint cannot know: it announced the check, needs an import, or depends on the machine."""
    announced = by == "dslpar" and any(finding.code in ANNOUNCED for finding in verdict.findings)
    return announced or any(words in said for words in MACHINE + IMPORTED)


def false_refusals(verdicts: Iterable[Verdict]) -> Counter[str]:
    """Return how often lint refused a config that could be built, by code."""
    wrong = [set(verdict.codes) for verdict in verdicts if not verdict.passes and verdict.accepted]
    return Counter(code for codes in wrong for code in (codes - BESIDE_OTHERS or codes))


def check(verdicts: Sequence[Verdict]) -> None:
    """Print the table, and fail for each false pass and each refusal without a reason."""
    print(table(verdicts))
    wrong = false_passes(verdicts)
    assert not wrong, f"{len(wrong)} false passes:\n" + "\n".join(wrong[:5])
    assert set(false_refusals(verdicts)) <= set(REASONS)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a table of the verdicts, with the false refusals and their reasons."""
    passing = [verdict for verdict in verdicts if verdict.passes]
    asked = [built for verdict in passing for built in verdict.built]
    refused = Counter(verdict.built[0].by or "accepted" for verdict in verdicts if not verdict.passes)
    said = [
        f"lint passes {len(passing)} of {len(verdicts)}; of their {len(asked)} ranks"
        f" {sum(built.accepted for built in asked)} were built and {sum(built.stepped for built in asked)} took a step",
        f"lint refuses {len(verdicts) - len(passing)}; past it: {dict(refused)}",
    ]
    counts = false_refusals(verdicts)
    return "\n".join([*said, *(f"  {code} {counts[code]:3}  {REASONS.get(code, '?')}" for code in sorted(counts))])


# ---- which configs ----


def compiled(case: Case) -> set[str]:
    """Return the builders that DeepSpeed would compile for a case."""
    offloaded_lion = {"CPULionBuilder"} if "Lion" in case.text else set()
    return {builder for name, builder in COMPILED.items() if name in case.text} | offloaded_lion


@cache
def covering() -> tuple[Case, ...]:
    """Return as many cases as the tests run, chosen to differ; none needs compiling."""
    cases = [case for case in map(sample, range(ALL)) if not compiled(case)]
    chosen, seen = [], set[str]()
    for case in cases:
        new = set(_features(case)) - seen
        if new and len(chosen) < IN_TEST:
            chosen.append(case)
            seen |= new
    rest = [case for case in cases if not case.broken and case not in chosen]
    return (*chosen, *rest[: IN_TEST - len(chosen)])


def _features(case: Case) -> Iterator[str]:
    """Yield the features of a config."""
    config = config_of(case)
    yield case.broken
    if has_errors(linter_check.lint(config, case.world)):
        return
    job = linter_check.resolve(config, case.world)
    piped = "piped" if job.mesh.pipe > 1 else "whole"
    yield from (f"{piped} {job.mesh.tensor.mode}", f"{piped} zero {job.spec.zero.stage}", job.spec.precision.dtype)
    yield f"{piped} {type(job.spec.model).__name__} {job.mesh.order}"


def keys_of_spec() -> set[str]:
    """Return every key that a config can have; an optimizer's or scheduler's own keys by name alone."""
    sections = {
        "parallel": (spec.Parallel,), "parallel.data": (spec.DataParallel,),
        "parallel.pipeline": (spec.PipelineParallel,),
        "parallel.tensor": (spec.TensorParallel,), "parallel.context": (spec.ContextParallel,),
        "model": (section.GPT,), "data": (spec.TextData,),
        "optimizer": (spec.AdamW, spec.SGD), "lr_scheduler": (spec.LRScheduler,), "batch": (spec.Batch,),
        "train": (spec.Train,), "train.dist": (spec.Dist,), "activation_checkpoint": (spec.ActivationCheckpoint,),
        "checkpoint": (spec.Checkpoint,), "monitor": (spec.Monitor,), "monitor.csv": (spec.FileMonitor,),
        "monitor.tensorboard": (spec.FileMonitor,), "monitor.wandb": (spec.WandbMonitor,),
        "schedule": (spec.PipelineSchedule,),
    }  # fmt: skip
    ours = {f"{name}.{item.name}" for name, classes in sections.items() for cls in classes for item in fields(cls)}
    theirs = {
        "zero": deepspeed_policy.ZERO,
        "precision": {**deepspeed_policy.BF16, **deepspeed_policy.FP16},
        "deepspeed": deepspeed_policy.TOP,
    }
    # Names of files, which these configs do not have, and experts, which a GPT does not have.
    ours -= {"data.tokenizer", "model.pretrained", "parallel.expert"}
    return ours | {f"{name}.{key}" for name, keys in theirs.items() for key in keys}


def check_coverage(cases: Iterable[Case]) -> None:
    """Check that every key, name, mode and stage occurs among configs that lint passes; stop when all have."""
    keys, names, layouts = set[str](), set[str](), set[tuple[str | None, int, bool]]()
    known = {name for rows in (OPTIMIZERS, LR_SCHEDULERS) for name, row in rows.items() if not row.refused}
    known |= {"constant", "linear", "cosine"}
    possible = {(mode, stage, False) for mode in (*MODES, None) for stage in range(4)}
    possible |= {(mode, stage, True) for mode in (*MODES, None) for stage in range(2)}
    of_spec = keys_of_spec()
    for case in cases:
        if of_spec <= keys and known <= names and possible <= layouts:
            return
        config = config_of(case)
        if has_errors(linter_check.lint(config, case.world)):
            continue
        keys |= set(sections_reader.read(config).written)
        job = linter_check.resolve(config, case.world)
        sections = (job.spec.optimizer, job.spec.lr_scheduler)
        names |= {str(getattr(section, "target", getattr(section, "type", ""))) for section in sections}
        layouts.add((job.mesh.tensor.mode, job.spec.zero.stage, job.mesh.pipe > 1))
    assert of_spec <= keys, sorted(of_spec - keys)
    assert known <= names, known - names
    assert possible <= layouts, possible - layouts


# ---- the tests ----


@pytest.mark.prove
@pytest.mark.minutes(3)
def test_lint_and_deepspeed_agree() -> None:
    verdicts = judge(covering())
    check(verdicts)
    assert any(verdict.passes for verdict in verdicts)


def test_the_1_000_cover_the_spec() -> None:
    check_coverage(sample(seed) for seed in range(ALL))


@pytest.mark.prove
@pytest.mark.minutes(10)
@pytest.mark.parametrize("part", range(PARTS))
def test_lint_and_deepspeed_agree_on_1_000(part: int) -> None:
    check(judge(_compiled_first([sample(seed) for seed in range(part, ALL, PARTS)])))


def _compiled_first(cases: list[Case]) -> list[Case]:
    """Compile once what many ranks need. Without a compiler, leave out and count the cases that need one."""
    needed = set().union(*map(compiled, cases))
    if shutil.which("c++") is None or shutil.which("ninja") is None:
        kept = [case for case in cases if not compiled(case)]
        print(f"no compiler: {len(cases) - len(kept)} configs with {', '.join(sorted(needed))} are left out")
        return kept
    from deepspeed.accelerator import get_accelerator

    for name in sorted(needed):
        get_accelerator().create_op_builder(name).load(verbose=False)
    return cases


# ---- the test can fail ----

MODEL = "model = dict(type='GPT', num_layers=2, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=8)\n"


def test_a_false_pass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linter that passes everything also passes what DeepSpeed refuses."""
    case = Case(0, MODEL + "parallel = dict(pipeline=2)\nzero = 2\n", 2, (1,), "")
    assert false_passes(judge([case])) == []
    monkeypatch.setattr(linter_check, "lint", lambda *_: [])
    monkeypatch.setattr(linter_check, "resolve", forced_job)
    (said,) = false_passes(judge([case]))
    assert "DeepSpeed: AssertionError" in said


def test_a_false_refusal_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(0, MODEL + "train = dict(stepz=1)\n", 2, (0, 1), "")
    verdicts = judge([case])
    assert false_refusals(verdicts) == {"CFG101": 1}
    monkeypatch.delitem(dict(REASONS), "CFG101")
    monkeypatch.setattr("tests.properties.oracle.test_oracle.REASONS", {})
    with pytest.raises(AssertionError):
        check(verdicts)


# ---- what it once found ----

LAYER = "dict(type='torch.nn.Linear', in_features=8, out_features=8)"
FOUND = {
    "TEN130": f"model = dict(type='Sequential', layers_cfg=[{LAYER}])\n"
    "parallel = dict(tensor=dict(size=2, mode='1d'))\n",
    "PIP113": "model = dict(type='Sequential', layers_cfg=[{'type': 'ReLU'}, {'type': 'ReLU'}])\n"
    "parallel = dict(pipeline=dict(size=2, method='parameters'))\n",
    "BAT130": MODEL + "optimizer = dict(type='ASGD', differentiable=True)\n",
    "BAT131": MODEL + "optimizer = dict(type='Adagrad', fused=True, foreach=True)\n",
}


@pytest.mark.parametrize("code", FOUND)
def test_what_it_found_is_refused(code: str) -> None:
    with pytest.raises(DslparError, match=code):
        linter_check.resolve(linter_check.load_text(FOUND[code], "cfg.py"), 2)


def test_betas_of_two_kinds_of_numbers_run() -> None:
    text = MODEL + "optimizer = dict(type='AdamW', betas=[0, 0.5])\n"
    (verdict,) = judge([Case(0, text, 2, (0, 1), "")])
    assert verdict.passes
    assert verdict.accepted, verdict.built
