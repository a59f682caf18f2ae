"""Pages of what ends a run that was going well: memory, disks, numbers that are not finite. See docs/faults.md."""

from __future__ import annotations

from dslpar.linter.catalog.page import RunTimePage

PAGES = (
    RunTimePage(
        "CKP230",
        "disk-full",
        """
Rank 0 cannot write a line of metrics.jsonl, or of a monitor's file.

What it does:
    Notes the error, tells all ranks at the end of the step, and ends the run on all of them with status 1.

Why:
    A run whose numbers are lost, and whose next checkpoint will be too, only costs. What was saved is as it was.

Use instead:
    train = dict(output_dir='/another/disk/run')  # or make room there; then --resume
""",
    ),
    RunTimePage(
        "HST230",
        "out-of-memory",
        """
A rank asked for more memory than its device or its host has.

What it does:
    Stands beneath the traceback of torch's OutOfMemoryError, of its CPU allocator's error, and of MemoryError.

Why:
    The traceback says how much was asked for and where, and not which keys of the config decide it.

Use instead:
    batch = dict(global_size=64, micro_size=1)  # activation_checkpoint=1, zero=1 to 3, precision='bf16'
""",
    ),
    RunTimePage(
        "PRE230",
        "not-finite",
        """
The loss or the gradient was not finite for more steps in a row than train.max_skipped allows.

What it does:
    Counts such steps, which leave the weights as they are. When it ends the run it looks once where the first value
    stands that is not finite: at the weights, then in one more forward and backward at every layer and parameter.

Why:
    A step that is skipped now and then is fp16 finding its scale. A run that skips all of them never recovers.

Use instead:
    optimizer = dict(type='AdamW', lr=1e-4)  # a smaller one; train.clip_grad_norm=1.0; precision='bf16'
""",
    ),
)
