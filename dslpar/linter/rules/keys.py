"""CFG101 and on: keys, types and values of the sections; what `dslpar.schema.sections_reader` could not read, one
page a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.core.errors import WORLD, Location
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule


@rule("CFG101", "unknown-key")
def unknown_key(cx: Context) -> Iterator[Problem]:
    """A key that its section does not have.

    What it does:
        Compares every key, at any depth, in files and on the command line, with the keys of its section.

    Why:
        A misspelt key would leave a default in force. DeepSpeed accepts such keys in silence.

    Example:
        parallel = dict(pipline=2)

    Use instead:
        parallel = dict(pipeline=2)
    """
    yield from cx.misreads("CFG101")


@rule("CFG102", "wrong-type")
def wrong_type(cx: Context) -> Iterator[Problem]:
    """A value of another type than its key takes.

    What it does:
        Checks the type of every value. True is no number, 2.0 is no whole number, '2' is neither.

    Why:
        Nothing is converted: what was meant is for the author to say.

    Example:
        parallel = dict(pipeline='2')

    Use instead:
        parallel = dict(pipeline=2)
    """
    yield from cx.misreads("CFG102")


@rule("CFG103", "out-of-range")
def out_of_range(cx: Context) -> Iterator[Problem]:
    """A value of the right type that its key cannot take.

    What it does:
        Checks the range of every value.

    Why:
        Nothing is clamped.

    Example:
        parallel = dict(pipeline=0)

    Use instead:
        parallel = dict(pipeline=1)
    """
    yield from cx.misreads("CFG103")


@rule("CFG104", "missing-key")
def missing_key(cx: Context) -> Iterator[Problem]:
    """A section without a key that it needs.

    What it does:
        Checks that keys without a default are there.

    Why:
        There is no value that could be meant.

    Example:
        parallel = dict(tensor=dict(mode='1d'))

    Use instead:
        parallel = dict(tensor=dict(size=2, mode='1d'))
    """
    yield from cx.misreads("CFG104")


@rule("CFG105", "misspelt-section")
def misspelt_section(cx: Context) -> Iterator[Problem]:
    """A top-level name that resembles a section's, and that nothing uses.

    What it does:
        Compares the file's own variables with the names of the sections. Names that begin with `_`, are all capitals,
        or are read somewhere in the file are left alone.

    Why:
        The section would be missing in silence.

    Example:
        paralel = dict(pipeline=2)

    Use instead:
        parallel = dict(pipeline=2)
    """
    yield from cx.misreads("CFG105")


@rule("CFG106", "unused-dict", "warning")
def unused_dict(cx: Context) -> Iterator[Problem]:
    """A top-level dict that is no section, and that nothing uses.

    What it does:
        Finds mappings among the file's own variables that no expression reads.

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
        Looks for the section `model`, the only one that is required.

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
    """A name that is none of those that its key takes.

    What it does:
        Compares types and other choices with their lists.

    Why:
        A name that nobody knows cannot be built.

    Example:
        optimizer = dict(type='AdmaW')

    Use instead:
        optimizer = dict(type='AdamW')
    """
    yield from cx.misreads("CFG108")


# CFG109 said that a key was not in the version at hand; no version says so any more, and no other rule has its code.


@rule("CFG110", "said-twice")
def said_twice(cx: Context) -> Iterator[Problem]:
    """Two keys that mean the same.

    What it does:
        Finds a field that is given under its name and under an alias, or in two places.

    Why:
        Only one of the two can be followed.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64,
                     cfg=dict(hidden_layers=4))

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)
    """
    yield from cx.misreads("CFG110")


@rule("CFG111", "unknown-model", "info")
def unknown_model(cx: Context) -> Iterator[Problem]:
    """The model is a class whose layers dslpar does not know, and the config does not list them.

    What it does:
        Says that rules about layers, heads and sizes were skipped.

    Why:
        The class is not imported to lint, so its sizes are not known.

    Example:
        model = dict(type='my_package.my_module.MyModel')

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)
    """
    if cx.unlisted:
        message = f"dslpar does not know the layers of {cx.unlisted}: rules about layers and sizes are skipped"
        yield cx.problem("model", message, "")


@rule("CFG112", "no-world-size", "info")
def no_world_size(cx: Context) -> Iterator[Problem]:
    """No world size was given.

    What it does:
        Says that rules which need the number of ranks were skipped.

    Why:
        The data size, and with it the batch, follow from the world.

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
    """A top-level name that another framework reads, and that nothing here uses.

    What it does:
        Finds the file's own variables and dicts that have the name of a key of ColossalAI's, LiBai's, Megatron-LM's or
        DeepSpeed's, and are read nowhere in the file. Names that begin with `_` or are all capitals are left alone.

    Why:
        The run would go on without it, in fp32 or unclipped, and nobody would notice. `dslpar import` brings a whole
        config of another framework over.

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
