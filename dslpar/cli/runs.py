"""`dslpar runs [FOLDER]`: list the training runs below a folder. `dslpar runs plot A B`: plot their curves.

Both work without torch. The list reads only the ends of a run's files, and `plot` reads all of metrics.jsonl.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dslpar.checkpoint import folder as checkpoint_folder
from dslpar.cli import arguments
from dslpar.cli.action import Action
from dslpar.core.requirements import explain_missing
from dslpar.core.visible import visible
from dslpar.reporting import curves, plot_svg, plot_terminal, run_dir, run_list
from dslpar.reporting.curves import Panel
from dslpar.reporting.run_list import Run

DEFAULT = "list"
"""The default action: `dslpar runs outputs`."""


# ---- list ----

_LIST_HELP = """\
dslpar runs                                   all runs below outputs/
dslpar runs outputs --sort loss               the lowest loss first
dslpar runs plot outputs/a outputs/b          their curves

states: running (its process holds the folder's lock), finished, stopped (on request, with a
checkpoint), interrupted (Ctrl-C, or a signal that left no time to save), failed, unknown (its
folder has no record of it). Only the ends of files are read. Unreadable files are listed below
the table, and in `problems` with --format json.

exit status: 0, 2 wrong usage"""


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _LIST_HELP
    parser.add_argument("folder", nargs="?", default="outputs", metavar="FOLDER", help="default: %(default)s")
    help = "sort in ascending order, runs without a value last; default: name"
    parser.add_argument("--sort", choices=("name", *_SORTS), default="name", help=help)
    parser.add_argument("--reverse", action="store_true", help="sort in descending order")
    parser.add_argument("--state", choices=run_list.STATES, help="list only runs in this state")
    arguments.add_format(parser)


def _list(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        runs = [_with_checkpoint(run) for run in run_list.find_runs(Path(args.folder), _tell_unreadable)]
    except OSError as error:
        parser.error(f"cannot read {args.folder}: {error.strerror}")
    if not _reads_manifests() and any(run.checkpoint for run in runs):
        missing = explain_missing("that", "xxhash")
        sys.stderr.write(visible(f"note: the checkpoints' manifests are not checked: {missing}") + "\n")
    runs = _sorted([run for run in runs if args.state in (None, run.state)], args.sort, args.reverse)
    if args.format == "json":
        arguments.print_json([_as_json(run) for run in runs])
    elif not runs:
        print(visible(f"no runs in {args.folder}"))
    else:
        _print_table(runs)
    return 0


def _tell_unreadable(error: OSError) -> None:
    sys.stderr.write(visible(f"{error.filename}: {error.strerror}") + "\n")


def _reads_manifests() -> bool:
    """Return whether this environment can check a manifest's digest; `pip install dslpar` alone cannot."""
    return importlib.util.find_spec("xxhash") is not None


def _with_checkpoint(run: Run) -> Run:
    """Return the run with the name of its newest checkpoint.

    A run without metrics, such as that of a user's program, also gets the checkpoint's step.
    """
    try:
        found = checkpoint_folder.list_folders(run.path / run_dir.CHECKPOINTS)
    except OSError as error:
        return run._replace(problems=(*run.problems, f"{run_dir.CHECKPOINTS}: {error.strerror}"))
    if not found:
        return run
    try:
        if _reads_manifests():
            checkpoint_folder.open_checkpoint(found[-1])
    except checkpoint_folder.ManifestError as error:
        where = f"{run_dir.CHECKPOINTS}/{found[-1].name}/{checkpoint_folder.MANIFEST}"
        run = run._replace(problems=(*run.problems, f"{where}: {error}"))
    step = checkpoint_folder.step_of(found[-1]) if run.step is None else run.step
    return run._replace(checkpoint=found[-1].name, step=step)


_SORTS: Mapping[str, Callable[[Run], float | None]] = {
    "state": lambda run: run_list.STATES.index(run.state),
    "step": lambda run: run.step,
    "loss": lambda run: run.loss,
    "eval_loss": lambda run: run.eval_loss,
    "tokens_per_s": lambda run: run.per_s,
    "age": lambda run: None if run.updated_s is None else -run.updated_s,
}


def _sorted(runs: Sequence[Run], by: str, reverse: bool) -> list[Run]:
    if by == "name":
        return list(reversed(runs)) if reverse else list(runs)
    value = _SORTS[by]
    there = [(number, run) for run in runs if (number := value(run)) is not None]
    there.sort(key=lambda pair: pair[0], reverse=reverse)
    return [run for _, run in there] + [run for run in runs if value(run) is None]


def _as_json(run: Run) -> dict[str, object]:
    """Return the values of --format json. Programs rely on these names, so do not change them."""
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run.state,
        "reason": run.reason,
        "step": run.step,
        "steps": run.steps,
        "loss": run.loss,
        "eval_loss": run.eval_loss,
        "eval_step": run.eval_step,
        f"{run.unit}_per_s": run.per_s,
        "layout": run.layout,
        "world_size": run.world_size,
        "checkpoint": run.checkpoint,
        "updated_s": run.updated_s,
        "problems": list(run.problems),
    }


_RIGHT = {"step", "loss", "held-out", "per s", "age"}
"""Right-aligned columns."""


_DROPPED_FIRST = ("layout", "checkpoint")
"""Columns that a narrow terminal omits, in this order."""


def _print_table(runs: Sequence[Run]) -> None:
    now = time.time()
    rows = [_row(run, now) for run in runs]
    lines = [{key: key for key in rows[0]}, *rows]
    widths = {key: max(len(line[key]) for line in lines) for key in rows[0]}
    left_out = []
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        for key in _DROPPED_FIRST:
            if sum(widths.values()) + 2 * (len(widths) - 1) > columns:
                del widths[key]
                left_out.append(key)
    for line in lines:
        cells = [line[key].rjust(width) if key in _RIGHT else line[key].ljust(width) for key, width in widths.items()]
        print("  ".join(cells).rstrip())
    for run in runs:
        for text in (*([run.reason] if run.state in ("failed", "interrupted", "stopped") else []), *run.problems):
            print(visible(f"{run.name}: {text}"))
    if left_out:
        print(" and ".join(left_out) + ": in a wider terminal, or with --format json")


def _row(run: Run, now: float) -> dict[str, str]:
    return {
        "run": visible(run.name),
        "state": run.state,
        "step": "-" if run.step is None else f"{run.step:,}" + (f"/{run.steps:,}" if run.steps else ""),
        "loss": _decimal(run.loss, ".4f"),
        "held-out": _decimal(run.eval_loss, ".4f"),
        "per s": _decimal(run.per_s, ",.0f") + ("" if run.per_s is None else f" {run.unit}"),
        "layout": visible(run.layout or "-"),
        "checkpoint": visible(run.checkpoint or "-"),
        "age": "-" if run.updated_s is None else _duration(now - run.updated_s),
    }


def _decimal(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _duration(seconds: float) -> str:
    """Format a time in its largest unit: 3 s, 5 min, 2 h, 9 d."""
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((each for each in units if seconds >= each[0]), units[-1])
    return f"{max(seconds, 0) // size:.0f} {unit}"


# ---- plot ----

_PLOT_HELP = """\
dslpar runs plot outputs/a outputs/b                       on the terminal
dslpar runs plot outputs/* -o curves.svg --smooth 20       a picture
dslpar runs plot outputs/a --metrics loss,eval_loss --x tokens --log loss

Metrics are keys of metrics.jsonl. For a run on images, tokens_per_s shows images_per_s. A skipped
step leaves a gap. PNG needs matplotlib (dslpar[plot]).

exit status: 0 drawn, 1 no run has any of the metrics, 2 wrong usage"""


def _add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _PLOT_HELP
    parser.add_argument("folders", nargs="+", metavar="RUN", help="a run's output_dir")
    parser.add_argument("-o", "--output", metavar="FILE", help="an .svg or .png file to write; default: the terminal")
    names = ",".join(curves.METRICS)
    parser.add_argument("--metrics", default=names, metavar="NAMES", help="metrics to draw; default: %(default)s")
    help = "the x axis; time is seconds spent in steps; default: %(default)s"
    parser.add_argument("--x", choices=curves.XS, default="step", help=help)
    help = "draw the mean of the last N values; default: %(default)s"
    parser.add_argument("--smooth", type=arguments.whole_number, default=1, metavar="N", help=help)
    help = "metrics to draw on a logarithmic scale"
    parser.add_argument("--log", default="", metavar="NAMES", help=help)
    parser.add_argument(
        "--width", type=arguments.whole_number, metavar="N", help="width in columns; default: the terminal's width"
    )


def _plot(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    output, log = args.output and Path(args.output), _names(args.log)
    metrics = _names(args.metrics)
    if not metrics:
        parser.error("--metrics needs at least one name")
    if output and output.suffix not in (".svg", ".png"):
        parser.error(f"{output} is neither .svg nor .png")
    if output and output.suffix == ".png" and not importlib.util.find_spec("matplotlib"):
        parser.error("PNG needs matplotlib: pip install 'dslpar[plot]', or choose a name that ends in .svg")
    if unknown := set(log) - set(metrics):
        parser.error(f"--log {','.join(sorted(unknown))}: not among --metrics")
    for each in args.folders:
        if not Path(each).is_dir():
            parser.error(f"{each} is not a folder")
    panels, problems = curves.read_panels([Path(each) for each in args.folders], metrics, args.x, args.smooth)
    for problem in (*problems, *_missing(panels)):
        sys.stderr.write(visible(problem) + "\n")
    if not any(panel.finite() for panel in panels):
        return 1
    if output is None:
        terminal = plot_terminal.terminal_of(sys.stdout, os.environ)
        sys.stdout.write(plot_terminal.draw(panels, args.x, terminal._replace(width=args.width or terminal.width), log))
        return 0
    try:
        if output.suffix == ".svg":
            run_dir.write_atomically(output, plot_svg.draw(panels, args.x, log))
        else:
            from dslpar.reporting import plot_png  # needs matplotlib, which is optional

            plot_png.write(output, panels, args.x, log)
    except OSError as error:
        parser.error(f"cannot write {output}: {error.strerror}")
    return 0


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _missing(panels: Sequence[Panel]) -> Iterator[str]:
    """Yield one message per metric that no run has."""
    for panel in panels:
        if panel.curves and not any(curve.xs for curve in panel.curves):
            yield f"no run has {panel.metric}"


ACTIONS: Mapping[str, Action] = {
    "list": Action("list the runs below a folder with state, step, loss and layout", _add_list_arguments, _list),
    "plot": Action("draw runs' curves, on the terminal or in an .svg or .png file", _add_plot_arguments, _plot),
}
"""Actions of `dslpar runs`."""
