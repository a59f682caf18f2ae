"""Run the linter on one input and watch it: its cost, its side effects, and whether its findings are sound.

    report = run(range(1000))        # in this process, which is spent: an audit hook cannot be taken off
    report.failures, report.slowest

The hook is Python's audit hook (PEP 578). It sees every opening for writing, program start, socket, code object and
import.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from dslpar.cluster import hostfile
from dslpar.core.errors import COMMAND_LINE, WORLD, Finding, Location
from dslpar.language.errors import ConfigError
from dslpar.language.source import parse_quietly
from dslpar.linter import check, fixes
from dslpar.linter.report import text as report_text
from dslpar.migrate import writer
from dslpar.migrate.convert import convert
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import read_text
from dslpar.schema.frameworks import frameworks
from dslpar.schema.transformers_configs import installed_version
from tests.properties.fuzz.inputs import ROOT, Input, sample

MAX_CPU_S = 1.0
MAX_MESSAGE = 2000
HOSTS = "hosts"


class Failure(NamedTuple):
    """A problem with an input."""

    seed: int
    kind: str
    what: str

    def __str__(self) -> str:
        return f"sample({self.seed}) ({self.kind}): {self.what}"


class Report(NamedTuple):
    """Results of many inputs."""

    failures: list[Failure]
    slowest: tuple[float, int]
    """CPU seconds and the seed."""
    kinds: Counter[str]
    codes: Counter[str]
    cpu_s: float


# ---- forbidden actions ----


class Watch:
    """Records what the process does while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event in _WATCHED and not _WATCHED[event](args):
            self.seen.append(f"{event} {str(args)[:200]}")


def _reads_a_config(args: tuple[Any, ...]) -> bool:
    path, mode, flags = args
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    if not isinstance(path, str) or (flags or 0) & writes or set(mode or "r") & set("wax+"):
        return False
    if path == "<string>":  # Python 3.13's tokenizer looks there for an error's line
        return True
    # Of findings, read when one is made, and the keys of other frameworks.
    own = (ROOT / "dslpar" / "core" / "catalog", ROOT / "dslpar" / "migrate" / "data")
    is_own_text = path.startswith(tuple(map(str, own)))
    # Configs, descriptions of tokenizers and models, and chat templates (any name, but in no other folder).
    return is_own_text or path.endswith((".py", ".yaml", ".yml", ".json")) or os.path.dirname(path) == os.getcwd()


def _never(args: tuple[Any, ...]) -> bool:
    return False


def load_everything() -> None:
    """Import in advance what the linter imports on demand, so that any later import counts as an action."""
    for name in (*_LATE, *_modules_of_lint()):
        import_module(name)
    frameworks()  # read once, from dslpar's own tables
    installed_version()  # of transformers, which lint reads once


def _modules_of_lint() -> Iterator[str]:
    for package in ("cluster", "core", "costs", "forecast", "language", "layout", "linter", "linter/rules", "schema"):
        folder = ROOT / "dslpar" / package
        yield from (f"dslpar.{package.replace('/', '.')}.{path.stem}" for path in folder.glob("[!_]*.py"))
    for path in (ROOT / "dslpar" / "models").glob("*/*.py"):
        if path.stem in ("costs", "hugging_face", "rules"):
            yield f"dslpar.models.{path.parent.name}.{path.stem}"


_LATE = ("encodings.utf_8_sig", "encodings.ascii", "encodings.unicode_escape", "difflib", "json", "yaml", "string",
         "fractions", "decimal", "unicodedata", "inspect", "textwrap", "dslpar.layout.transformers_data_types",
         "dslpar.schema.transformers_policies", "dslpar.schema.policy")  # fmt: skip
_NEVER = """
import exec os.system os.exec os.fork os.forkpty os.posix_spawn os.spawn subprocess.Popen os.remove os.rename os.mkdir
os.rmdir os.chmod os.link os.symlink os.truncate os.chdir os.kill os.putenv socket.__new__ socket.connect
socket.bind ctypes.dlopen shutil.rmtree pty.spawn urllib.Request tempfile.mkstemp pickle.find_class
"""
_WATCHED: Mapping[str, Any] = {
    "open": _reads_a_config,
    **dict.fromkeys(_NEVER.split(), _never),
}  # fmt: skip


# ---- many inputs ----


def run(seeds: Iterable[int], folder: Path, progress: Any = None) -> Report:
    """Check all seeds; `progress` is called with each seed before it is tried."""
    os.chdir(folder)
    load_everything()
    watch = Watch()
    gc.collect()
    gc.freeze()
    failures: list[Failure] = []
    slowest, kinds, codes = (0.0, -1), Counter[str](), Counter[str]()
    began = time.process_time()
    for seed in seeds:
        if progress is not None:
            progress(seed)
        given = sample(seed)
        failed, cpu_s, found = one(given, watch)
        failures += [Failure(seed, given.kind, what) for what in failed]
        slowest = max(slowest, (cpu_s, seed))
        kinds[given.kind] += 1
        codes.update({finding.code for finding in found})
    return Report(failures[:50], slowest, kinds, codes, time.process_time() - began)


def one(given: Input, watch: Watch) -> tuple[list[str], float, Sequence[Finding]]:
    """Return the problems, the linter's CPU seconds, and its findings."""
    Path(given.name).unlink(missing_ok=True)  # overwriting a file costs more than creating one
    Path(given.name).write_bytes(given.data)
    watch.seen.clear()
    watch.on = True
    start = time.process_time()
    try:
        cluster = hostfile.parse(given.hostfile, HOSTS) if given.hostfile is not None else None
        config = check.load(given.name, given.overrides)
        found = check.lint(config, given.world, cluster=cluster)
        sources = {**config.sources, **({HOSTS: given.hostfile} if given.hostfile is not None else {})}
        name = list(report_text.FORMATS)[given.seed % len(report_text.FORMATS)]
        shown = report_text.FORMATS[name](found, sources)
        after = [*repaired(given, found, config.path), *imported(given)]
    except Exception as error:
        return [f"{type(error).__name__}: {error} {''.join(traceback.format_exception(error)[-3:])}"], 0.0, []
    finally:
        watch.on = False
    cpu_s = time.process_time() - start
    wrong = [f"it did {event}" for event in watch.seen] + after
    wrong += [f"{cpu_s:.2f} s of CPU"] if cpu_s > MAX_CPU_S else []
    for finding in found:
        wrong += [f"{finding.code} {said}: {finding}"[:600] for said in unsound(finding, sources, given)]
    shown.encode()  # raises here if it cannot be printed
    return wrong, cpu_s, found


# ---- changed texts ----


def repaired(given: Input, found: Sequence[Finding], path: str) -> list[str]:
    """Return problems of the text that `dslpar lint --fix` would write."""
    if not any(finding.fix for finding in found):
        return []

    def relint(texts: Mapping[str, str]) -> list[Finding]:
        return check.lint(check.load(path, given.overrides, texts), given.world)

    before = fixes.decode(given.data)
    after = fixes.repair(path, before, relint, {}).after
    wrong = ["a fix broke the syntax"] if _parses(before) and not _parses(after) else []
    again = fixes.repair(path, after, relint, {}).after
    return wrong + (["a second --fix changes more"] if again != after else [])


def _parses(text: str) -> bool:
    try:
        parse_quietly(text, "cfg.py")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def imported(given: Input) -> list[str]:
    """Return problems of the file that `dslpar import` would write, for some of the inputs."""
    if given.seed % 16 or not given.data.isascii() or len(given.data) > 20_000:
        return []
    name = tuple(TABLES)[given.seed // 16 % len(TABLES)]
    with contextlib.suppress(ConfigError):
        source = read_text(given.data.decode(), given.name, name)
        if source.config.complete and not _parses(writer.file_of(convert(source))):
            return [f"import from {name} writes no Python"]
    return []


# ---- findings ----


def unsound(finding: Finding, sources: Mapping[str, str], given: Input) -> list[str]:
    """Return problems of a finding."""
    wrong = [*_misplaced(finding.location, sources, given)]
    if finding.severity == "error" and not finding.help:
        wrong.append("has no help")
    if max(len(finding.message), len(finding.help)) > MAX_MESSAGE:
        wrong.append("is too long")
    if not finding.message or "\n" in finding.message:
        wrong.append("is not one line")
    if json.loads(json.dumps(finding.as_json())) != finding.as_json():
        wrong.append("is no JSON")
    return wrong


def _misplaced(place: Location, sources: Mapping[str, str], given: Input) -> list[str]:
    """Return problems of a place, such as being outside of its file."""
    if place.path not in {given.name, HOSTS, COMMAND_LINE, WORLD, *sources}:
        return ["has a path of no file"]
    if place.path not in sources:
        return [] if place[1:] == (1, 1, 1, 1) or place.path == given.name else ["has a place in no text"]
    lines = sources[place.path].split("\n")
    if not 1 <= place.line <= len(lines) or not place.line <= place.end_line <= len(lines):
        return [f"is outside of {len(lines)} lines"]
    ends = [len(lines[line - 1]) + 1 for line in (place.line, place.end_line)]
    if not 1 <= place.column <= ends[0] or not 1 <= place.end_column <= ends[1] + 1:
        return [f"is outside of its line of {ends[0] - 1} characters"]
    if (place.end_line, place.end_column) < (place.line, place.column):
        return ["ends before it begins"]
    return []


# ---- two processes ----


def in_processes(seeds: range, folder: Path, processes: int = 2) -> Report:
    """Split the seeds over processes. A process that crashes or hangs is a failure of its current seed."""
    workers = [_Worker(seeds[index::processes], folder / str(index)) for index in range(processes)]
    reports = [worker.report() for worker in workers]
    return Report(
        [failure for report in reports for failure in report.failures],
        max(report.slowest for report in reports),
        sum((report.kinds for report in reports), Counter()),
        sum((report.codes for report in reports), Counter()),
        sum(report.cpu_s for report in reports),
    )


class _Worker:
    """A fork that checks a share of the seeds."""

    def __init__(self, seeds: range, folder: Path) -> None:
        folder.mkdir()
        self.at = mmap.mmap(-1, 8)
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reading)
            self._work(seeds, folder, writing)
        os.close(writing)

    def _work(self, seeds: range, folder: Path, pipe: int) -> None:
        status = 1
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            answer = run(seeds, folder, self._note)
            with open(pipe, "wb") as writing:
                pickle.dump(answer, writing)
            status = 0
        finally:
            os._exit(status)

    def _note(self, seed: int) -> None:
        self.at[:] = struct.pack("q", seed)
        signal.setitimer(signal.ITIMER_PROF, 5)  # ends the process even in code that no exception reaches

    def report(self) -> Report:
        """Return its results."""
        with open(self.reading, "rb") as reading:
            data = reading.read()
        _, status = os.waitpid(self.pid, 0)
        if status == 0:
            report: Report = pickle.loads(data)
            return report
        (seed,) = struct.unpack("q", self.at)
        crashed = Failure(seed, sample(seed).kind, f"the process ended with status {os.waitstatus_to_exitcode(status)}")
        return Report([crashed], (0.0, -1), Counter(), Counter(), 0.0)
