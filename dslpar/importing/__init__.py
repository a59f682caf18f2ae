"""Configs of other frameworks to a config of dslpar's, with a report of every key: nothing is dropped in silence.

One mechanism (`convert`) and a table for each source (`colossal`, `libai`, `deepspeed`): a row says what becomes of a
key. The source is evaluated, never run. That a converter writes a file for people to read, and lists what it could not
carry over, is what the migration tools of ESLint, Prettier and Biome have taught; to us each key has a row.

    >>> from dslpar.importing.convert import convert
    >>> from dslpar.importing.sources import read_text
    >>> made = convert(read_text("parallel = dict(pipeline=2)\\nclip_grad_norm = 1.0\\n", "old.py", "colossalai"))
    >>> [(entry.key, entry.fate, entry.to) for entry in made.entries if entry.key]
    [('parallel.pipeline', 'kept', 'parallel.pipeline'), ('clip_grad_norm', 'renamed', 'train.clip_grad_norm')]
"""
