"""CFG001 and on: the config language; `dslpar.language` makes these findings while it evaluates the file."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.core.errors import Finding
from dslpar.linter.context import Context
from dslpar.linter.rule import rule


@rule("CFG001", "syntax-error")
def syntax_error(cx: Context) -> Iterator[Finding]:
    """The file cannot be parsed as Python (or, by its ending, as YAML or JSON).

    What it does:
        Reports where the parser stopped. The rest of the file is not checked.

    Why:
        A config has Python's syntax, which editors, formatters and people know.

    Example:
        parallel = dict(pipeline=2, tensor=dict(size=2)

    Use instead:
        parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
    """
    yield from cx.language("CFG001")


@rule("CFG002", "unsupported-syntax")
def unsupported_syntax(cx: Context) -> Iterator[Finding]:
    """Python that is not part of the config language: `while`, `def`, `class`, `try`, `with`, `lambda`, `:=` ...

    What it does:
        Reports each such statement or expression, even if it is unreachable, and evaluates the rest.

    Why:
        Configs are evaluated, never executed: a stranger's config must do no harm, and evaluating it must always end.

    Example:
        steps = 1
        while steps < 1000:
            steps *= 2
        train = dict(steps=steps)

    Use instead:
        steps = 1
        for _ in range(10):
            steps *= 2
        train = dict(steps=steps)
    """
    yield from cx.language("CFG002")


@rule("CFG003", "unsupported-call")
def unsupported_call(cx: Context) -> Iterator[Finding]:
    """A call of a function that is not part of the config language.

    What it does:
        Reports calls of anything but the language's functions and the pure methods of str, list and dict.

    Why:
        An imported name is a reference: it is imported when the model is built, not when the config is loaded. So the
        same file can be linted without torch and without your package.

    Example:
        from my_package import make_model

        model = make_model(num_layers=2)

    Use instead:
        from dslpar import LazyCall as L
        from my_package import MyModel

        model = L(MyModel)(num_layers=2)
    """
    yield from cx.language("CFG003")


@rule("CFG004", "evaluation-error")
def evaluation_error(cx: Context) -> Iterator[Finding]:
    """An expression that fails in Python as well: a missing key, a division by zero, a failed `assert`.

    What it does:
        Reports it where it happens, and evaluates the rest: values that depend on the failed one are unknown, and cause
        no further findings.

    Why:
        All mistakes of a file are reported at once.

    Example:
        samples, global_size = 1_000_000, 0
        train = dict(steps=samples // global_size)

    Use instead:
        samples, global_size = 1_000_000, 32
        train = dict(steps=samples // global_size)
    """
    yield from cx.language("CFG004")


@rule("CFG005", "limit-exceeded")
def limit_exceeded(cx: Context) -> Iterator[Finding]:
    """A value that is too large, an expression that is nested too deeply, or an evaluation of too many steps.

    What it does:
        Limits the number of steps, the sizes of ints, strings and containers, nesting, and the length of the source.

    Why:
        No file can hang the linter or fill the memory of a login node.

    Example:
        parallel = dict(pipeline=dict(size=2, stage_ids=[0] * 10**10))

    Use instead:
        parallel = dict(pipeline=dict(size=2, stage_ids=[0] * 4 + [1] * 4))
    """
    yield from cx.language("CFG005")


@rule("CFG006", "import-not-found")
def import_not_found(cx: Context) -> Iterator[Finding]:
    """An imported config file, or a name in it, that does not exist.

    What it does:
        Looks up relative imports from the file's folder, and `get_config(...)` beside the file, in its parent folders,
        and among the shipped configs.

    Why:
        Otherwise the job would fail at its start.

    Example:
        from .missing import optimizer

    Use instead:
        optimizer = dict(type='AdamW', lr=3e-4)
    """
    yield from cx.language("CFG006")


@rule("CFG007", "import-cycle")
def import_cycle(cx: Context) -> Iterator[Finding]:
    """Config files that import each other in a cycle.

    What it does:
        Reports the import that closes the cycle. (The example is `cfg.py`, and imports itself.)

    Why:
        Each import evaluates a file again, so a cycle never ends.

    Example:
        from .cfg import optimizer

    Use instead:
        optimizer = dict(type='AdamW', lr=3e-4)
    """
    yield from cx.language("CFG007")


@rule("CFG008", "star-import")
def star_import(cx: Context) -> Iterator[Finding]:
    """`import *` in a config.

    What it does:
        Reports star imports from config files and from packages.

    Why:
        Neither a reader nor the linter can tell where a name comes from.

    Example:
        from math import *

        optimizer = dict(type='AdamW', lr=3e-4 * sqrt(2))

    Use instead:
        from math import sqrt

        optimizer = dict(type='AdamW', lr=3e-4 * sqrt(2))
    """
    yield from cx.language("CFG008")


@rule("CFG009", "unreadable-file")
def unreadable_file(cx: Context) -> Iterator[Finding]:
    """A file that cannot or may not be read: missing, a folder or device, not UTF-8, outside of the search path.

    What it does:
        Reports it where the file is named; for the config itself, at its first line.

    Why:
        A config imports other configs relative to its own folder, and reads no other files.

    Example:
        from dslpar import get_config

        optimizer = get_config("/home/someone/private.py").optimizer

    Use instead:
        optimizer = dict(type='AdamW', lr=3e-4)
    """
    yield from cx.language("CFG009")


@rule("CFG010", "undefined-name")
def undefined_name(cx: Context) -> Iterator[Finding]:
    """An undefined name.

    What it does:
        Reports a name that is used before it is assigned, with a similar name if there is one.

    Why:
        Python would raise a NameError there.

    Example:
        base_lr = 3e-4
        optimizer = dict(type='AdamW', lr=2 * base_rl)

    Use instead:
        base_lr = 3e-4
        optimizer = dict(type='AdamW', lr=2 * base_lr)
    """
    yield from cx.language("CFG010")


@rule("CFG011", "bad-override")
def bad_override(cx: Context) -> Iterator[Finding]:
    """A `key=value` of the command line that is malformed, or whose key cannot exist.

    What it does:
        Reports overrides that are neither `key=value` nor `~key`, that set a key of a value which is not a mapping,
        whose index is beyond the end of a list, or that delete a missing key. The mistake is in the command line, not
        in the file, as in `dslpar lint cfg.py optimizer.lr.value=1e-4`.

    Why:
        An override without an effect is worse than none.

    Example:
        # override: optimizer.lr.value=1e-4
        optimizer = dict(type='AdamW', lr=3e-4)

    Use instead:
        # override: optimizer.lr=1e-4
        optimizer = dict(type='AdamW', lr=3e-4)
    """
    yield from cx.language("CFG011")


@rule("CFG012", "duplicate-key", "warning")
def duplicate_key(cx: Context) -> Iterator[Finding]:
    """A duplicate key in a dict; in YAML and JSON, an error.

    What it does:
        Reports the later key, whose value is used.

    Why:
        The earlier value looks as if it had an effect, and has none.

    Example:
        optimizer = {'type': 'AdamW', 'lr': 3e-4, 'lr': 1e-4}

    Use instead:
        optimizer = {'type': 'AdamW', 'lr': 1e-4}
    """
    yield from cx.language("CFG012")


@rule("CFG120", "section-replaced", "warning")
def section_replaced(cx: Context) -> Iterator[Finding]:
    """update() replaces a dict by one with fewer keys.

    What it does:
        Compares the dicts given to update() with the present ones of the same key, and names the keys that are lost.

    Why:
        As in Python, update() does not merge nested dicts: `train.update(dict(dist=dict(...)))`, a common line in
        projects on LiBai, loses the other keys of `dist`, and their defaults come into force.

    Example:
        train = dict(steps=10, dist=dict(pipeline_parallel_size=2, tensor_parallel_size=2))
        train.update(dict(dist=dict(tensor_parallel_size=4)))

    Use instead:
        train = dict(steps=10, dist=dict(pipeline_parallel_size=2, tensor_parallel_size=2))
        train.dist.tensor_parallel_size = 4
    """
    yield from cx.language("CFG120")


@rule("CFG013", "not-a-value")
def not_a_value(cx: Context) -> Iterator[Finding]:
    """A name whose value a config cannot hold: an iterator, or a `LazyCall` that is not called.

    What it does:
        Reports names whose final value is not None, a bool, a number, a string, a list, a tuple, a mapping, or a
        reference.

    Why:
        Such a value can neither be checked nor saved to `config.yaml`.

    Example:
        from dslpar import LazyCall as L
        from my_package import MyModel

        model = L(MyModel)

    Use instead:
        from dslpar import LazyCall as L
        from my_package import MyModel

        model = L(MyModel)(num_layers=2)
    """
    yield from cx.language("CFG013")


RULES = (
    syntax_error,
    unsupported_syntax,
    unsupported_call,
    evaluation_error,
    limit_exceeded,
    import_not_found,
    import_cycle,
    star_import,
    unreadable_file,
    undefined_name,
    bad_override,
    duplicate_key,
    not_a_value,
    section_replaced,
)
