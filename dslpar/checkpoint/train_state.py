"""Training state: step and sample counters (the data position), LR scheduler, loss scale. No random states.

Random states are in `rank_state`, weights and optimizer tensors in `shards`. The data continue from the counter
`global_samples`, the number of samples trained on.

Settings come from the present config, so a changed learning rate, decay or loss-scale window takes effect. For an LR
scheduler of the config section `lr_scheduler`, only its position is restored; the learning rate is that of the present
config at this step. torch's and DeepSpeed's schedulers do not separate position and settings. All plain values of their
state are restored, and the values that they set in the optimizer's groups.

DeepSpeed (`_load_checkpoint`) restores steps, samples, skipped steps, the LR scheduler, the loss scaler and random
layer-token dropping, all with their settings. It does not restore `micro_steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from dslpar.checkpoint.index import SET_BY_OPTIMIZER, SET_BY_SCHEDULER
from dslpar.checkpoint.state_files import COUNTS, LOSS_SCALE
from dslpar.engine.engine import Engine
from dslpar.schema import sections

Values = dict[str, Any]


def collect(engine: Engine) -> Values:
    """Collect the training state as plain values; a save writes rank 0's."""
    ds_engine = engine.deepspeed
    values: Values = {
        "counts": {name: int(getattr(ds_engine, name)) for name in COUNTS},
        "schedule": lr_scheduler_state(engine),
        "scale": _loss_scale(ds_engine),
    }
    if _uses_random_ltd(ds_engine):
        values["random_ltd"] = _plain_values(ds_engine.random_ltd_scheduler.state_dict())
    return values


def restore(engine: Engine, values: Mapping[str, Any], schedule: Mapping[str, Any] | None) -> None:
    """Restore the training state.

    `schedule`: this rank's saved LR scheduler state, if the layout is the saved one; None: use the state in `values`.
    """
    ds_engine = engine.deepspeed
    for name in COUNTS:
        setattr(ds_engine, name, values["counts"][name])
    # Without a pipeline DeepSpeed steps whenever its count of micro-batches is a multiple of `accumulation`.
    if engine.job.mesh.pipe == 1:
        ds_engine.micro_steps = ds_engine.global_steps * engine.job.batch.accumulation
    scaler = _scaler(ds_engine)
    # A static scale comes from the config. DeepSpeed's scalers have different counters with ZeRO and without.
    for name, value in values["scale"].items() if scaler is not None and _is_dynamic(scaler) else ():
        if hasattr(scaler, name):
            setattr(scaler, name, value)
    if _uses_random_ltd(ds_engine) and "random_ltd" in values:
        ds_engine.random_ltd_scheduler.load_state_dict(values["random_ltd"])
    _restore_lr_scheduler(engine, values["schedule"] if schedule is None else schedule)


# ---- the LR scheduler, and the groups that it sets ----


def uses_dslpar_schedule(engine: Engine) -> bool:
    """Return whether the LR scheduler is dslpar's own, whose learning rate depends on config and step only."""
    own_section = isinstance(engine.job.spec.lr_scheduler, sections.LRScheduler)
    return own_section and isinstance(engine.deepspeed.lr_scheduler, LambdaLR)


def lr_scheduler_state(engine: Engine) -> Values:
    """Return the plain values of the LR scheduler's state."""
    scheduler = engine.deepspeed.lr_scheduler
    return {} if scheduler is None else _plain_values(scheduler.state_dict())


def _restore_lr_scheduler(engine: Engine, saved: Mapping[str, Any]) -> None:
    scheduler = engine.deepspeed.lr_scheduler
    if scheduler is None or not saved:
        return
    if uses_dslpar_schedule(engine):
        # With the _step_count of a new scheduler, torch would warn that the scheduler steps before the optimizer.
        scheduler.last_epoch, scheduler._step_count = saved["last_epoch"], saved["_step_count"]
        groups = scheduler.optimizer.param_groups
        for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * factor(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
    else:
        state = dict(scheduler.state_dict())
        for key, value in saved.items():
            present = state.get(key)
            # A list has one value per optimizer group, and the saving rank may have had another number of groups.
            if isinstance(value, list) and isinstance(present, list) and len(value) != len(present):
                value = [value[0]] * len(present) if all(each == value[0] for each in value) else present
            state[key] = value
        scheduler.load_state_dict(state)


def group_values(group: Mapping[str, Any]) -> Values:
    """Return the plain values of an optimizer's group, without its parameters."""
    return {key: value for key, value in _plain_values(group).items() if key != "params" and not key.startswith("_")}


def restore_group(engine: Engine, group: Any, saved: Mapping[str, Any]) -> None:
    """Restore an optimizer group's values that the optimizer or a scheduler of torch or DeepSpeed changes."""
    keys = [key for key in SET_BY_OPTIMIZER if key in saved]  # FusedAdam's group has no "step" before its first step
    if not uses_dslpar_schedule(engine):
        keys += [key for key in SET_BY_SCHEDULER if key in saved and key in group]
    for key in keys:
        present = group.get(key)
        if isinstance(present, Tensor):  # filled in place, since a kernel may hold a reference to it
            present.fill_(saved[key])
        else:  # JSON has no tuples
            group[key] = tuple(saved[key]) if isinstance(present, tuple) else saved[key]


# ---- the loss scale ----


def _scaler(ds_engine: Any) -> Any:
    """Return DeepSpeed's loss scaler: `loss_scale_config` without ZeRO, `loss_scaler` with ZeRO; None: no scaling."""
    return getattr(ds_engine.optimizer, "loss_scale_config", None) or getattr(ds_engine.optimizer, "loss_scaler", None)


def _is_dynamic(scaler: object) -> bool:
    return bool(getattr(scaler, "dynamic_loss_scale", False) or getattr(scaler, "dynamic", False))


def _loss_scale(ds_engine: Any) -> Values:
    scaler = _scaler(ds_engine)
    if scaler is None or not _is_dynamic(scaler):
        return {}
    return {name: getattr(scaler, name) for name in LOSS_SCALE if hasattr(scaler, name)}


def _uses_random_ltd(ds_engine: Any) -> bool:
    """Return whether DeepSpeed drops tokens in layers at random (random-LTD), more of them early in the run."""
    return bool(ds_engine.random_ltd_enabled()) and getattr(ds_engine, "random_ltd_scheduler", None) is not None


def _plain_values(values: Mapping[str, Any]) -> Values:
    """Return the values that are numbers, strings, lists and dicts, which torch.load reads with weights_only=True."""
    plain = {key: _plain_value(value) for key, value in values.items()}
    return {key: value for key, value in plain.items() if value is not _NOT_PLAIN}


_NOT_PLAIN = object()


def _plain_value(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if type(value) is dict:
        return _plain_values(value)
    if isinstance(value, list | tuple):
        items = [_plain_value(item) for item in value]
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
    return _NOT_PLAIN
