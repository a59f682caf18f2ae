"""Output formats for findings: text with a caret, JSON, GitHub's workflow commands, SARIF.

In: findings, and the texts that they point into. Out: text for standard output. Each format is one function.
"""
