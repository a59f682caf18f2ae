"""The linter: rules by family, one function a rule; each rule's docstring is its page (`dslpar explain CODE`)."""
