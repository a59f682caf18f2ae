"""Findings that end a run: non-finite numbers, a full disk, a deleted run folder.

All ranks raise the same finding at the same step, since they exchange flags first.
"""

from __future__ import annotations

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError
from dslpar.data.loader import StepData
from dslpar.engine import nonfinite
from dslpar.engine.engine import Engine
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.resolve import Job
from dslpar.reporting.resume_hint import newest_step, write_hint
from dslpar.training.divergence import suspects

_MAX_SKIPPED = 3


def max_skipped(job: Job) -> int:
    """Return how many steps in a row may be skipped: `train.max_skipped`, by default 3.

    With fp16's dynamic loss scale, the default is the number of steps in which the scale falls to its minimum, if that
    is larger.
    """
    if job.spec.train.max_skipped is not None:
        return job.spec.train.max_skipped
    fp16 = ds_config(job).get("fp16", {})
    if not fp16.get("enabled") or fp16.get("loss_scale", 0):
        return _MAX_SKIPPED
    return max(_MAX_SKIPPED, int(fp16.get("initial_scale_power", 16)) + int(fp16.get("hysteresis", 2)) - 2)


def not_finite(engine: Engine, data: StepData, consumed: int, how: str, num_skipped: int) -> DslparError:
    """Return the finding for the step after `consumed` samples; it names the first non-finite value.

    num_skipped: the last steps that were skipped, up to the last step that is done.
    """
    step = consumed // engine.job.batch.global_size + 1
    if engine.is_between_steps:
        first = nonfinite.find_first_nonfinite(engine, data.step(consumed))
    else:  # the search runs another forward, which is possible only between steps
        first = f"not looked for, in the middle of a step; {engine.rank_description}"
    message = (
        f"the loss or the gradient is not finite {how}, most recently in step {step}; the first such value: {first}"
    )
    found = suspects(engine.job.spec, num_updates=engine.steps_done - num_skipped, lr=engine.lr)
    hint = "; or ".join(suspect.advice for suspect in found)
    if newest_step(engine.job.output_dir) is not None:
        hint += "; then --resume from a step before it diverged, checkpoint.resume_from=NAME"
    return DslparError([finding("PRE230", message, hint, engine.job.path, found[0].key)])


def disk_full(engine: Engine, error: OSError | None) -> DslparError:
    """Return the finding for a rank that cannot write; `error` is known only on that rank."""
    job = engine.job
    where = f": {engine.rank_description}: {error}" if error else f" in step {engine.steps_done}"
    message = f"cannot write to {job.output_dir}{where}"
    return DslparError([finding("CKP230", message, write_hint(job, str(error)), job.path, "train.output_dir")])


def run_folder_gone(engine: Engine, last_checkpoint: str) -> DslparError:
    """Return the finding for a deleted or moved run folder; `last_checkpoint`: the last step's checkpoint, or ""."""
    folder, step = engine.job.output_dir, engine.steps_done
    message = f"{folder} was deleted or moved while the run wrote to it, and with it metrics and earlier checkpoints"
    saved = f"; step {step} is saved in {last_checkpoint}" if last_checkpoint else "; nothing is saved"
    hint = "move what was there back, or --resume from that step" if last_checkpoint else "start again"
    return DslparError([finding("CKP231", message + saved, hint, engine.job.path)])
