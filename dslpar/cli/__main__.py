"""`python -m dslpar.cli`: the command line of `dslpar`, for a checkout that is not installed."""

from __future__ import annotations

from dslpar.cli.main import run

if __name__ == "__main__":
    run()
