"""What a config may say: typed sections whose fields carry all facts about their keys, and the reader.

In: the tree of a config (dslpar.language). Out: a `Spec`, or findings for unknown keys and wrong values. `fields` is
how a key is declared, `keys` what follows for all of them. Names that torch and DeepSpeed take stand in data/, so that
no torch is needed to lint; tests compare them with the installed packages.
"""
