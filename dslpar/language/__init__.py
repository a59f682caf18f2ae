"""The config language: Python syntax, evaluated, never executed.

    >>> from dslpar.language.load import load
    >>> config = load("configs/gpt_3d.py", ["parallel.pipeline=4"])     # doctest: +SKIP
    >>> config.root.get("parallel.pipeline").value                      # doctest: +SKIP
    4

In: the path or text of a config, and overrides. Out: a `Config`, the tree of its values with their origins, and every
finding. `evaluator` dispatches to handlers of syntax (expressions, containers, calls, targets, imports, statements),
`session` reads the files of one load, `limits` bounds it; `lazy` is `LazyCall` for programs, which load no evaluator.
"""
