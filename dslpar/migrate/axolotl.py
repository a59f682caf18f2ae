"""Conversions for Axolotl's YAML (rows: data/axolotl.txt)."""

from __future__ import annotations

from dslpar.migrate.conversions import number
from dslpar.migrate.table import Outcome, Row, View, dropped, needed


def adapter(value: object, view: View, row: Row) -> Outcome:
    """Drop the name of the adapter that dslpar has; other adapters need the author."""
    if value in ("", "none", False):
        return dropped("all weights are trained")
    if value == "lora":
        return dropped("lora_r and further keys are model.lora")
    return needed(f"{value!r}: dslpar has LoRA of weights that are not quantized", row.to)


@number
def eval_fraction(value: float, view: View, row: Row) -> Outcome:
    """Keep a share of the data for evaluation; a number of samples needs the author."""
    if value == 0:
        return dropped("no data are held out")
    return row.as_is(value) if value < 1 else needed(f"{value:g} samples: choose a share of the data", row.to)


def only_one_shard(value: object, view: View, row: Row) -> Outcome:
    """Drop the number of replicas of HSDP; with shards beside them dslpar has no counterpart."""
    if value in (0, 1, -1) or view.value("dp_shard_size") in (None, 1, -1):
        return dropped(row.why)
    return needed("HSDP shards within replicas: dslpar's ZeRO shards over all of them; leave it out", "zero.stage")
