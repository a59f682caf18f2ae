"""Config language: Python syntax that is evaluated and never executed.

    >>> from dslpar.language.load import load
    >>> config = load("configs/gpt_3d.py", ["parallel.pipeline=4"])     # doctest: +SKIP
    >>> config.root.get("parallel.pipeline").value                      # doctest: +SKIP
    4

`load` takes the path or text of a config and its overrides. It returns a `Config`: the tree of values with their
origins, and every finding. `evaluator` dispatches to the handlers of syntax (expressions, containers, calls, targets,
imports, statements). `load_session` reads the files of one load, and `limits` bounds their evaluation. `lazy` provides
`LazyCall` to programs, without importing the evaluator.
"""
