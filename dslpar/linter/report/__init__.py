"""The formats of findings, for people and programs: text with a caret, JSON, GitHub's workflow commands, SARIF."""
