"""The training program, one process a rank: `train.py --config FILE [key=value ...]`, under any launcher or none.

    deepspeed --num_gpus 8 train.py --config configs/gpt_3d.py train.steps=50
    mpirun -np 8 --bind-to none python train.py --config configs/gpt_3d.py
    python train.py --config configs/gpt_3d.py parallel=None            # one process, the same path

The config is loaded, linted and resolved before torch is imported, and before any process group exists. Rank 0 speaks;
the others only in error. Exit status: 0 the run is done, 1 it cannot run or has failed, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslpar import bootstrap, flow
from dslpar.bootstrap import Place
from dslpar.errors import WORLD, DslparError, Finding, Location, has_errors
from dslpar.job import Job
from dslpar.linter import formats

if TYPE_CHECKING:
    from dslpar.config.load import Config
    from dslpar.data.corpus import Corpus, Piece
    from dslpar.data.text import Text
    from dslpar.engine import Engine

log = logging.getLogger("dslpar")

_PATIENCE_S = 10
"""How long a rank that has nothing to say waits to be ended by the launcher, after rank 0 has said why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one rank; returns its exit status."""
    try:
        place = bootstrap.find(os.environ)
    except DslparError as error:
        sys.stderr.write(formats.text(error.findings, {}))
        return 1
    bootstrap.end_at_errors(place)
    with _voice(place) as unsaid:
        status, ready = _prepare(place, sys.argv[1:] if argv is None else argv)
    if ready is not None:
        return _run(place, *ready)
    if status and place.rank:
        time.sleep(_PATIENCE_S)  # rank 0 most often says the same, and the launcher ends this one
        sys.stderr.write(f"rank {place.rank} on {socket.gethostname()} cannot run:\n{unsaid.getvalue()}")
    return status


def _run(place: Place, job: Job, corpus: Corpus, config: Config) -> int:
    """The run itself; its exit status."""
    bootstrap.start(place, os.environ)
    try:
        _agree(place, job, corpus)  # so from here on, every rank has read the config
        folder = _claim(place, job, config)
    except DslparError as error:
        if place.rank == 0:
            _say(error.findings, config.sources)
        bootstrap.stop(together=False)
        return 1
    with _logging(folder):
        try:
            _train(job, corpus, folder)
        except DslparError as error:  # what the machine alone could tell, and tells every rank
            log.error("%s", formats.text(error.findings, {}).rstrip())
            bootstrap.stop(together=False)
            return 1
    bootstrap.stop()
    return 0


# ---- before anything starts ----

Ready = tuple[Job, "Corpus", "Config"]
"""What will run, on what text, and what says so."""


def _prepare(place: Place, words: Sequence[str]) -> tuple[int, Ready | None]:
    """Everything that can be known to be wrong before a process group exists; with it, the exit status."""
    from dslpar.data.corpus import corpus_of

    config: Config | None = None
    try:
        arguments = _parser().parse_intermixed_args(words)
        config = flow.load(arguments.config, arguments.overrides)
        findings = flow.lint(config, place.world_size)
        _say(findings, config.sources)
        if has_errors(findings):
            return 1, None
        job = flow.job_of(config, place.world_size)
        return 0, (job, corpus_of(job), config)
    except DslparError as error:
        _say(error.findings, config.sources if config else {})
        return 1, None
    except SystemExit as ended:  # argparse's, which has printed why
        return int(ended.code or 0), None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train.py", description="Train what a config describes, on this rank.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the config")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # launchers add it; see bootstrap
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config's keys")
    return parser


def _claim(place: Place, job: Job, config: Config) -> Path | None:
    from dslpar import record

    return record.claim(job, config) if place.rank == 0 else None


def _say(findings: Sequence[Finding], sources: Mapping[str, str]) -> None:
    if findings:
        sys.stderr.write(formats.text(findings, sources))


@contextlib.contextmanager
def _voice(place: Place) -> Iterator[io.StringIO]:
    """Rank 0 speaks, since the others say the same; what they would have said is kept."""
    unsaid = io.StringIO()
    if place.rank == 0:
        yield unsaid
        return
    with contextlib.redirect_stderr(unsaid), contextlib.redirect_stdout(unsaid):
        yield unsaid


def _agree(place: Place, job: Job, corpus: Corpus) -> None:
    """All ranks together: they have the same job, text and versions, on whatever host they are.

    Raises:
        DslparError: on every rank, if one differs from rank 0.
    """
    from dslpar import comm

    world = comm.Axis(place.world_size, place.rank, tuple(range(place.world_size)))
    seen = comm.gather_objects((socket.gethostname(), _identity(job, corpus)), world)
    differ = [
        f"rank {rank} on {host} has another {', another '.join(what for what in mine if mine[what] != first[what])}"
        for first in (seen[0][1],)
        for rank, (host, mine) in enumerate(seen)
        if mine != first
    ]
    if differ:
        said = "; ".join(differ[:4]) + (f"; and {len(differ) - 4} more" if len(differ) > 4 else "")
        help_ = f"give every host the config, text and packages of rank 0, on {seen[0][0]}"
        raise DslparError([Finding("HST203", "ranks-differ", "error", said, help_, Location(WORLD))])


def _identity(job: Job, corpus: Corpus) -> dict[str, str]:
    """What must be the same on all ranks; where files lie may differ."""
    from dslpar import record

    text = [(os.path.basename(piece.path), piece.num_bytes) for piece in (*corpus.train, *corpus.held_out)]
    return {
        "config": repr(dataclasses.replace(job, path="", output_dir="")),
        "text": hashlib.sha256(repr(text).encode()).hexdigest(),
    } | {f"version of {name}": number for name, number in record.versions().items()}


# ---- the run ----


def _train(job: Job, corpus: Corpus, folder: Path | None) -> None:
    from dslpar import engine as engines
    from dslpar.data.text import Text
    from dslpar.groups import Groups

    with _set_aside(folder):
        engine = engines.build(job, Groups(job.mesh), all_counted=Text.all_counted)
    _introduce(job, engine)
    run = _Steps(job, engine, corpus, folder)
    before = run.held_out_loss()
    if before is not None:
        log.info("held-out loss before: %.4f", before)
    after = run.all_steps()
    if before is not None and after is not None:
        log.info("held-out loss before: %.4f, after: %.4f", before, after)


class _Steps:
    """The steps of a run: samples in, metrics out; it holds no more than the position of the engine."""

    def __init__(self, job: Job, engine: Engine, corpus: Corpus, folder: Path | None) -> None:
        self.job, self.engine, self.folder = job, engine, folder
        self.samples = self._read(corpus.train)
        self.held_out = self._read(corpus.held_out) if job.spec.train.eval_interval else None

    def all_steps(self) -> float | None:
        """Trains to the last step. Returns the held-out loss after it, if it is asked for."""
        with contextlib.ExitStack() as stack:
            metrics = stack.enter_context(open(self._metrics, "a", encoding="utf-8")) if self.folder else None
            bar = stack.enter_context(_progress(self.job.spec.train.steps, self.engine.step, shown=bool(metrics)))
            record: dict[str, Any] = {}
            while self.engine.step < self.job.spec.train.steps:
                record = self._step()
                if metrics is not None:
                    self._report(metrics, record)
                bar.update()
        return record.get("eval_loss")

    def held_out_loss(self) -> float | None:
        """The loss over the same `eval_steps` global batches of held-out text each time; None if not asked for."""
        if self.job.spec.train.eval_interval is None:
            return None
        size, steps = self.job.batch.global_size, self.job.spec.train.eval_steps
        return sum(self.engine.eval_batch(self._batches(self.held_out, step * size)) for step in range(steps)) / steps

    def _step(self) -> dict[str, Any]:
        """One step; its line in metrics.jsonl."""
        train, engine = self.job.spec.train, self.engine
        began = time.perf_counter()
        loss = engine.train_batch(self._batches(self.samples, engine.consumed_samples))
        step_s = time.perf_counter() - began
        record: dict[str, Any] = {
            "step": engine.step,
            "loss": loss,
            "grad_norm": engine.grad_norm,
            "lr": engine.lr,
            "tokens": engine.consumed_samples * self.job.seq_len,
            "step_s": step_s,
            "tokens_per_s": self.job.batch.global_size * self.job.seq_len / step_s,
        }
        if train.eval_interval and (engine.step % train.eval_interval == 0 or engine.step == train.steps):
            record["eval_loss"] = self.held_out_loss()
        return record

    def _report(self, metrics: Any, record: Mapping[str, Any]) -> None:
        from dslpar.record import write_line

        write_line(metrics, record)
        train = self.job.spec.train
        if record["step"] % train.log_interval == 0 or record["step"] == train.steps or "eval_loss" in record:
            held_out = f"  held-out {record['eval_loss']:.4f}" if "eval_loss" in record else ""
            log.info(
                "step %d/%d  loss %.4f  norm %.3f  lr %.3g  %.0f tokens/s%s",
                *(record["step"], train.steps, record["loss"], record["grad_norm"], record["lr"]),
                *(record["tokens_per_s"], held_out),
            )

    def _read(self, pieces: Sequence[Piece]) -> Text | None:
        from dslpar.data.text import Text

        return Text.of(pieces, self.job.seq_len) if self.engine.feeds else None

    def _batches(self, samples: Text | None, consumed: int) -> Iterator[Any]:
        """This rank's micro-batches of the step that begins after `consumed` samples."""
        from dslpar.data.order import micro_batches

        if samples is None:
            return iter(())
        data, coord = self.job.mesh.data, self.engine.groups.coord
        return micro_batches(samples, self.job.batch, self.job.spec.train.seed, consumed, data, coord["data"])

    @property
    def _metrics(self) -> Path:
        from dslpar.record import METRICS

        assert self.folder is not None
        return self.folder / METRICS


def _introduce(job: Job, engine: Engine) -> None:
    """What runs, in two lines."""
    mesh, cuboid, batch = job.mesh, job.mesh.tensor, job.batch
    mode = f" ({cuboid.mode})" if cuboid.mode else ""
    log.info(
        "%s: world of %d = pipeline %d * data %d * tensor %d%s, on %s; written to %s",
        *(job.path, mesh.world_size, mesh.pipe, mesh.data, cuboid.size, mode, engine.deepspeed.device, job.output_dir),
    )
    log.info(
        "%d samples of %d tokens a step = micro %d * accumulation %d * data %d; ZeRO %d, %s",
        *(batch.global_size, job.seq_len, batch.micro_size, batch.accumulation, mesh.data),
        *(job.spec.zero.stage, job.spec.precision.dtype),
    )


# ---- who says what where ----


@contextlib.contextmanager
def _logging(folder: Path | None) -> Iterator[None]:
    """Our lines to the terminal and to log.txt; DeepSpeed's and Python's warnings to log.txt alone; all by rank 0."""
    from dslpar.record import LOG

    theirs = [logging.getLogger("DeepSpeed"), logging.getLogger("py.warnings")]
    for logger in theirs:
        logger.handlers, logger.propagate = [], False
    logging.captureWarnings(True)
    log.propagate = False
    if folder is None:
        for logger in (log, *theirs):
            logger.addHandler(logging.NullHandler())
        yield
        return
    file = logging.FileHandler(folder / LOG, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for logger in (log, *theirs):
        logger.setLevel(logging.INFO)
        logger.addHandler(file)
    log.addHandler(_Terminal())
    try:
        yield
    finally:
        file.close()


class _Terminal(logging.Handler):
    """Lines above the progress bar, if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


def _progress(steps: int, done: int, shown: bool) -> Any:
    """A bar on a terminal; nothing elsewhere."""
    from tqdm import tqdm

    return tqdm(total=steps, initial=done, unit="step", disable=not (shown and sys.stderr.isatty()), leave=False)


@contextlib.contextmanager
def _set_aside(folder: Path | None) -> Iterator[None]:
    """What DeepSpeed prints while it builds goes to log.txt."""
    from dslpar.record import LOG

    with open(folder / LOG if folder else os.devnull, "a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        yield


if __name__ == "__main__":
    sys.exit(main())
