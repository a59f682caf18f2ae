"""The input of the rules: the config, its typed sections (the spec), the world size and the hosts.

A rule need not check its input. Reading a value that is unknown raises `UnknownValueError`: an invalid field of
`cx.spec`, or `cx.world.size` if no world size was given. The exception ends the rule without a finding, since the
invalid value already has one from another rule.

Values that follow from keys are members of a subject: `cx.world`, `cx.model`, `cx.pipeline`, `cx.tensor`, `cx.layout`.
`cx.source` has the keys as the author wrote them, and their locations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from dslpar.core.errors import Finding, Location
from dslpar.core.project import trusted_packages
from dslpar.language.load import Config
from dslpar.layout.resolve import Job, resolve
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.subjects import AnyWorld, Layout, Pipeline, RequestedModel, Tensor, World
from dslpar.schema.sections_reader import Reading

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster
    from dslpar.schema.sections import Spec


class Context:
    """One config under lint."""

    def __init__(
        self,
        config: Config,
        reading: Reading,
        world_size: int | None = None,
        cluster: Cluster | None = None,
        by_program: bool = False,
        of_any_world: bool = False,
        forecasts: bool = True,
        read: list[str] | None = None,
    ) -> None:
        self.config = config
        self.reading = reading
        """The sections as they were read. Its spec has a default or a placeholder for each invalid value."""
        self.spec = _spec(reading, read)
        """The sections, in which each invalid value is unknown."""
        self.source = Source(config, reading.written, read)
        self.world = AnyWorld() if of_any_world else World(world_size, cluster)
        by_program = by_program and not config.has("model") and "model" not in config.unknown
        self.model = RequestedModel(self.spec, reading.invalid, by_program)
        self.pipeline = Pipeline(self.spec)
        self.tensor = Tensor(self.spec, reading.invalid)
        self.layout = Layout(self.spec, self.world, self.pipeline, self.tensor)
        self.forecasts = forecasts
        """Whether rules forecast memory; False for commands that make a forecast of their own."""
        self.comment_problems: Callable[[str], Iterable[Problem]] = lambda code: ()
        """Code -> problems of `# dslpar: ignore` comments; set by the engine if the sources contain any."""
        self.is_legal: Callable[[], bool] = lambda: False
        """Whether the rules that ran so far found no error; set by the engine."""

    def of_any_world(self) -> Context:
        """Return a context without a world size and hosts: a rule ends as soon as it reads either.

        If a rule runs to its end with this context, its findings do not depend on the world size or the hosts.
        """
        return Context(self.config, self.reading, by_program=self.model.by_program, of_any_world=True)

    @cached_property
    def job(self) -> Job:
        """The resolved job; unknown if a rule found an error, or if there is no world size."""
        if not self.is_legal():
            raise UnknownValueError("job")
        return resolve(self.reading.spec, self.world.size, self.config.path, trusted_packages(self.config.trusted))

    def problem(self, keys: str | tuple[str, ...], message: str, hint: str) -> Problem:
        """Make a problem at the value of the first key that the author wrote (see `Source.at`)."""
        key = keys if isinstance(keys, str) else self.source.first_given(keys)
        return Problem(self.source.at(key), message, hint, self.source.key(key))

    def problem_of_key(self, key: str, message: str, hint: str) -> Problem:
        """Make a problem at the name of a key; `problem` makes one at its value."""
        return Problem(self.config.key_at(key), message, hint, key)

    def language(self, code: str) -> Iterator[Finding]:
        """Yield the findings with that code that evaluating the file made."""
        return (finding for finding in self.config.findings if finding.code == code)

    def misreads(self, code: str) -> Iterator[Problem]:
        """Yield the problems with that code that reading the sections found."""
        for misread in self.reading.misreads:
            if misread.code == code:
                yield Problem(misread.location, misread.message, misread.help, misread.key, misread.fix)


def _spec(reading: Reading, read: list[str] | None) -> Spec:
    spec = reading.spec
    if reading.invalid:
        from dslpar.linter.unknown_values import with_unknown  # valid configs do not need it

        spec = with_unknown(spec, reading.invalid)
    if read is not None:
        from dslpar.linter.traced import traced  # only reports that show related places need it

        spec = traced(spec, read)
    return spec


class Source:
    """The keys that the author wrote, and where they are."""

    def __init__(self, config: Config, written: Mapping[str, str], read: list[str] | None = None) -> None:
        self._config = config
        self._written = written
        self._read = read

    def key(self, key: str) -> str:
        """Return the key as the author wrote it, for instance an alias or the key of a shorthand."""
        return self._written.get(key, key)

    def given(self, key: str) -> bool:
        """Return whether the author wrote the key."""
        if self._read is not None:
            self._read.append(key)
        return key in self._written

    def first_given(self, keys: tuple[str, ...]) -> str:
        """Return the first key that the author wrote; if none was, the last key."""
        return next((key for key in keys if self.given(key)), keys[-1])

    def at(self, key: str) -> Location:
        """Return the location of a key's value; if nobody wrote the key, of its section."""
        return self._config.at(self.key(key))

    def at_item(self, key: str, index: int) -> Location:
        """Return the location of an item of a list."""
        return self._config.at(f"{self.key(key)}.{index}")
