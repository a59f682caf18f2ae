"""Findings as people and programs read them: text with a caret, JSON, GitHub's workflow commands, SARIF."""
