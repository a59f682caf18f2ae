"""What a config may say: typed sections with a help text for each field, their types, and the reader.

In: the tree of a config (dslpar.language). Out: a `Spec`, or findings for unknown keys and wrong values. Beside the
sections stand the names that torch and DeepSpeed take, as data, so that no torch is needed to lint; tests hold them
against the installed packages.
"""
