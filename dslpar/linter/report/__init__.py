"""The formats of findings, for people and programs: text with a caret, JSON, GitHub's workflow commands, SARIF.

In: findings, and the texts that they point into. Out: text for standard output; each format is one function in a module
of its own.
"""
