"""CFG101 and on: keys, types and values of the sections, as `dslpar.schema.sections_reader` reads them."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.core.errors import WORLD, Location
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("CFG101", "unknown-key")
def unknown_key(cx: Context) -> Iterator[Problem]:
    """An unknown key.

    What it does:
        Compares every key, at any depth, in files and on the command line, with the keys of its section.

    Why:
        A misspelt key would leave the default in force. DeepSpeed silently accepts such keys.

    Example:
        parallel = dict(pipline=2)

    Use instead:
        parallel = dict(pipeline=2)
    """
    yield from cx.misreads("CFG101")


@rule("CFG102", "wrong-type")
def wrong_type(cx: Context) -> Iterator[Problem]:
    """A value of the wrong type.

    What it does:
        Checks the type of every value. True is not a number, 2.0 is not a whole number, '2' is neither.

    Why:
        Values are never converted, since a conversion may not be what the author meant.

    Example:
        parallel = dict(pipeline='2')

    Use instead:
        parallel = dict(pipeline=2)
    """
    yield from cx.misreads("CFG102")


@rule("CFG103", "out-of-range")
def out_of_range(cx: Context) -> Iterator[Problem]:
    """A value outside of its key's range.

    What it does:
        Checks the range of every value.

    Why:
        Values are never clamped to the range.

    Example:
        parallel = dict(pipeline=0)

    Use instead:
        parallel = dict(pipeline=1)
    """
    yield from cx.misreads("CFG103")


@rule("CFG104", "missing-key")
def missing_key(cx: Context) -> Iterator[Problem]:
    """A section without a required key.

    What it does:
        Checks that keys without a default are given.

    Why:
        There is no value to fall back on.

    Example:
        parallel = dict(tensor=dict(mode='1d'))

    Use instead:
        parallel = dict(tensor=dict(size=2, mode='1d'))
    """
    yield from cx.misreads("CFG104")


@rule("CFG105", "misspelt-section")
def misspelt_section(cx: Context) -> Iterator[Problem]:
    """An unused top-level name that resembles a section's.

    What it does:
        Compares the file's variables with the names of the sections. Names that begin with `_`, are in capitals, or are
        used in the file are accepted.

    Why:
        The section would silently be missing.

    Example:
        paralel = dict(pipeline=2)

    Use instead:
        parallel = dict(pipeline=2)
    """
    yield from cx.misreads("CFG105")


@rule("CFG106", "unused-dict", "warning")
def unused_dict(cx: Context) -> Iterator[Problem]:
    """An unused top-level dict that is not a section.

    What it does:
        Finds mappings among the file's variables that no expression uses.

    Why:
        It looks like a section of another framework, and has no effect.

    Example:
        nothing = dict(a=1)

    Use instead:
        _nothing = dict(a=1)
    """
    yield from cx.misreads("CFG106")


@rule("CFG107", "no-model")
def no_model(cx: Context) -> Iterator[Problem]:
    """The config has no model.

    What it does:
        Checks that there is a section `model`, the only required one.

    Why:
        There is nothing to train.

    Example:
        model = None

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)
    """
    yield from cx.misreads("CFG107")


@rule("CFG108", "unknown-choice")
def unknown_choice(cx: Context) -> Iterator[Problem]:
    """An unknown type or choice.

    What it does:
        Compares types and other choices with the known ones.

    Why:
        An unknown class cannot be built, and an unknown choice has no effect.

    Example:
        optimizer = dict(type='AdmaW')

    Use instead:
        optimizer = dict(type='AdamW')
    """
    yield from cx.misreads("CFG108")


# CFG109 was of keys that a version did not support yet. Codes are never reused.


@rule("CFG110", "said-twice")
def said_twice(cx: Context) -> Iterator[Problem]:
    """A value that is given twice, under two keys.

    What it does:
        Finds a field that is given both under its name and under an alias, or in two places.

    Why:
        Only one of the two values can have an effect.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64,
                     cfg=dict(hidden_layers=4))

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)
    """
    yield from cx.misreads("CFG110")


@rule("CFG111", "unknown-model", "info")
def unknown_model(cx: Context) -> Iterator[Problem]:
    """The layers of the model are not known.

    What it does:
        Reports that rules about layers, heads and sizes are skipped, for a class of which the config does not list the
        layers.

    Why:
        Linting does not import the class, so its sizes are not known.

    Example:
        model = dict(type='my_package.my_module.MyModel')

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)
    """
    if cx.unlisted:
        message = f"the layers of {cx.unlisted} are not known: rules about layers and sizes are skipped"
        yield cx.problem("model", message, "")


@rule("CFG112", "no-world-size", "info")
def no_world_size(cx: Context) -> Iterator[Problem]:
    """No world size is given.

    What it does:
        Reports that rules which need the number of ranks are skipped.

    Why:
        The data size, and with it the batch, follows from the world size.

    Example:
        parallel = dict(pipeline=2)  # dslpar lint FILE

    Use instead:
        parallel = dict(pipeline=2)  # dslpar lint FILE --world-size 8
    """
    if cx.world_size is None and cx.cluster is None:
        message = "no world size is given: rules that need it are skipped"
        yield Problem(Location(WORLD), message, "--world-size N, or --hostfile FILE")


@rule("CFG121", "key-of-another-framework")
def key_of_another_framework(cx: Context) -> Iterator[Problem]:
    """An unused top-level name that is a key of another framework.

    What it does:
        Finds variables with the name of a key of ColossalAI, LiBai, Megatron-LM or DeepSpeed that the file does not
        use. Names that begin with `_` or are in capitals are accepted.

    Why:
        The run would silently do without it, for instance in fp32 or without clipping. `dslpar import` converts a whole
        config of another framework.

    Example:
        clip_grad_norm = 1.0

    Use instead:
        train = dict(clip_grad_norm=1.0)
    """
    yield from cx.misreads("CFG121")


RULES = (
    unknown_key,
    wrong_type,
    out_of_range,
    missing_key,
    misspelt_section,
    unused_dict,
    no_model,
    unknown_choice,
    said_twice,
    unknown_model,
    no_world_size,
    key_of_another_framework,
)
