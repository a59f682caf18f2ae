"""Output formats for findings: text with a caret, JSON, GitHub's workflow commands, SARIF.

Each format is one function from findings, and the source texts at which they point, to the text for standard output.
"""
