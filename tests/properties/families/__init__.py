"""transformers' model families through DeepSpeed: `python -m tests.properties.families` compares and records."""
