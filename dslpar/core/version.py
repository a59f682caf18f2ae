"""Version of dslpar; setup.cfg reads it."""

VERSION = "0.1.0"
