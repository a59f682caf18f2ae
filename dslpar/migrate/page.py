"""docs/import.md, from the tables: `python -m dslpar.migrate.page > docs/import.md`; a test tells when it is old."""

from __future__ import annotations

import sys

from dslpar.migrate.convert import TABLES
from dslpar.migrate.rows import FATES, Row, Table

HEAD = """\
# dslpar import

```
dslpar import config.py                        # the file to standard output, the report to standard error
dslpar import config.py -o mine.py             # the file to mine.py, the report to standard output
dslpar import ds_config.json --model gpt.py    # DeepSpeed's JSON names no model: take a dslpar config's
dslpar import config.py --world-size 8 --num-samples 1281167    # epochs become steps
```

The source is evaluated, never run. Every key of it is in the report, once, with one of these fates:

| fate | means |
|---|---|
| kept | the same key, the same value |
| renamed | another key, the same value |
| changed in meaning | another value, or a value that means something else; a comment in the file says how |
| dropped | no counterpart, or none needed; the report says why |
| needs you | only you can say: an unknown key, what could not be evaluated, epochs of data, a model |
| added | no key of the source: what one of them implies, or what DeepSpeed needs besides |

Then the result is linted (`--world-size N` checks the layout too). Exit status: 0 nothing is left to do; 1 something
needs you, or lint finds errors; 2 the command line is wrong. OUT is never written over without `--force`.
`--format json` is the report for programs.

`--from colossalai`, `libai` or `deepspeed` says whose config it is where the file does not tell. A dslpar config is not
imported: it is one already.

- **DeepSpeed's JSON** may have comments (`//`, `#`, `/* */`), trailing commas and keys without quotes. HJSON without
  commas is not read: write JSON. `"auto"` is Hugging Face's: its Trainer fills the value in, so it needs you, but for
  sizes of ZeRO's buckets, where DeepSpeed's default stands in.
- **What a config of LiBai's imports** (`from .common.train import train`, `get_config(...)`, `from configs.common...`)
  is read from where it stands. Where it is missing, the report says so, and what the file itself sets is still read.
- **ColossalAI's rank order** is data, pipeline, tensor; a config that is loaded or imported has dslpar's (pipeline,
  data, tensor), in which groups have the same sizes. `order=('data', 'pipe', 'tensor')` in `parallel` is the old one.
- **Epochs** are steps here: one epoch is (samples of the data) / `batch.global_size` steps. `--num-samples N` says how
  many samples there are; then ColossalAI's are `epochs * (N // global_size)` steps, and LiBai's the ceiling of
  `epochs * N / global_size`, or `train_iter` if that is more. How many samples a step takes follows from the batch and,
  where the source gives that of one rank, from `--world-size`.
- **ColossalAI's `BATCH_SIZE`** is taken for the samples of one data rank, as its data loaders take it. Where a script
  of yours divides it by the data size, it is `batch.global_size`.

Below, `**` stands for any rest of a key. Where a row says more than one thing can happen, the value decides.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(table) for table in TABLES.values())


def _section(table: Table) -> str:
    rows = "".join(map(_row, table.rows))
    own = "Other names of the file's own are dropped; " if table.own_names else ""
    last = f"{own}{'o' if own else 'O'}ther keys need you.\n"
    return f"\n## {table.title}\n\n| key | fate | becomes | |\n|---|---|---|---|\n{rows}\n{last}"


def _row(row: Row) -> str:
    to = f"`{row.to}`" if row.to and row.fate != "dropped" else ""
    why = row.why.replace("|", "\\|")
    return f"| `{row.pattern}` | {FATES[row.fate]} | {to} | {why} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
