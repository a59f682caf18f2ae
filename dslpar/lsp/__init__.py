"""Language server: lint, completion and explanations of configs in an editor (`dslpar lsp`)."""
