"""What moves as a run goes on, beside weights and the optimizer's state: counts, the schedule, the loss scale.

Settings come from the config of now: a changed lr, decay or window takes effect. So of a schedule that dslpar makes
itself only the position is restored, and the learning rate is what *this* config has there. Other classes keep position
and settings in one: of these all plain values are restored, and with them what they have set in the optimizer's groups.

DeepSpeed (`_load_checkpoint`) restores the steps, samples and skipped steps, the schedule, the loss scaler and random
layer-token dropping, whole; `micro_steps` it forgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from dslpar.engine.engine import Engine
from dslpar.schema import sections

Values = dict[str, Any]

_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What a loss scaler changes by itself."""
_STEPPED = ("step",)
"""What an optimizer changes in its groups."""
_SCHEDULED = ("lr", "initial_lr", "momentum", "betas")
"""What schedules change there."""


def values_of(engine: Engine) -> Values:
    """All of it, as plain values; the same on every rank."""
    runner = engine.deepspeed
    values: Values = {
        "counts": {name: int(getattr(runner, name)) for name in _COUNTS},
        "schedule": schedule_of(engine),
        "scale": _scale(runner),
    }
    return values | ({"random_ltd": _plain(runner.random_ltd_scheduler.state_dict())} if _drops_tokens(runner) else {})


def restore(engine: Engine, values: Mapping[str, Any], schedule: Mapping[str, Any] | None) -> None:
    """Sets all of it; `schedule` is this rank's own, where its groups are those that were saved."""
    runner = engine.deepspeed
    for name, count in values["counts"].items():
        setattr(runner, name, count)
    if engine.job.mesh.pipe == 1:  # there DeepSpeed counts them, and a step begins at a multiple of the accumulation
        runner.micro_steps = runner.global_steps * engine.job.batch.accumulation
    scaler = _scaler(runner)
    for name, value in values["scale"].items() if scaler is not None and _is_dynamic(scaler) else ():
        if hasattr(scaler, name):
            setattr(scaler, name, value)
    if _drops_tokens(runner) and "random_ltd" in values:
        runner.random_ltd_scheduler.load_state_dict(values["random_ltd"])
    _restore_schedule(engine, values["schedule"] if schedule is None else schedule)


# ---- the schedule, and the groups that it sets ----


def is_ours(engine: Engine) -> bool:
    """Whether the schedule is of dslpar's own section, a curve of the step alone."""
    ours = isinstance(engine.job.spec.lr_scheduler, sections.LRScheduler)
    return ours and isinstance(engine.deepspeed.lr_scheduler, LambdaLR)


def schedule_of(engine: Engine) -> Values:
    """Where the schedule is; of one that is not dslpar's own, all its plain values."""
    scheduler = engine.deepspeed.lr_scheduler
    return {} if scheduler is None else _plain(scheduler.state_dict())


def _restore_schedule(engine: Engine, stored: Mapping[str, Any]) -> None:
    scheduler = engine.deepspeed.lr_scheduler
    if scheduler is None or not stored:
        return
    if is_ours(engine):
        scheduler.last_epoch, scheduler._step_count = stored["last_epoch"], stored["_step_count"]
        at = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, base, share in at:
            group["lr"] = base * share(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
    else:
        own = scheduler.state_dict()
        scheduler.load_state_dict(own | {key: _fitted(value, own.get(key)) for key, value in stored.items()})


def _fitted(stored: Any, own: Any) -> Any:
    """A list of one value for each group, on a stage that has another number of them."""
    if isinstance(stored, list) and isinstance(own, list) and len(stored) != len(own):
        return [stored[0]] * len(own) if all(value == stored[0] for value in stored) else own
    return stored


def group_values(group: Mapping[str, Any]) -> Values:
    """An optimizer's group without its parameters."""
    return {key: value for key, value in _plain(group).items() if key != "params" and not key.startswith("_")}


def restore_group(engine: Engine, group: Any, stored: Mapping[str, Any]) -> None:
    """What the optimizer, or a schedule that is not dslpar's own, has changed in one of its groups."""
    wanted = [key for key in _STEPPED if key in stored]  # FusedAdam has none before its first step
    if not is_ours(engine):
        wanted += [key for key in _SCHEDULED if key in stored and key in group]
    for key in wanted:
        group[key] = _like(stored[key], group.get(key))


def _like(value: Any, before: Any) -> Any:
    """JSON has no tuples, and a tensor that a kernel reads stays where it is."""
    if isinstance(before, Tensor):
        return before.fill_(value)
    return tuple(value) if isinstance(before, tuple) else value


# ---- the loss scale ----


def _scaler(runner: Any) -> Any:
    """DeepSpeed's loss scaler: without ZeRO a record in its optimizer, with ZeRO an object; None: nothing scales."""
    return getattr(runner.optimizer, "loss_scale_config", None) or getattr(runner.optimizer, "loss_scaler", None)


def _is_dynamic(scaler: Any) -> bool:
    return bool(getattr(scaler, "dynamic_loss_scale", False) or getattr(scaler, "dynamic", False))


def _scale(runner: Any) -> Values:
    scaler = _scaler(runner)
    if scaler is None or not _is_dynamic(scaler):
        return {}
    return {name: getattr(scaler, name) for name in _SCALE if hasattr(scaler, name)}


def _drops_tokens(runner: Any) -> bool:
    """Whether DeepSpeed drops tokens of layers at random (random-LTD), more of them early in the run."""
    return bool(runner.random_ltd_enabled()) and getattr(runner, "random_ltd_scheduler", None) is not None


def _plain(values: Mapping[str, Any]) -> Values:
    """Numbers, words, and what is made of them: what a file may hold that is read without running it."""
    made = {key: _value(value) for key, value in values.items()}
    return {key: value for key, value in made.items() if value is not _NONE}


_NONE = object()


def _value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if type(value) is dict:
        return _plain(value)
    if isinstance(value, list | tuple):
        items = [_value(item) for item in value]
        return _NONE if any(item is _NONE for item in items) else items
    return _NONE
