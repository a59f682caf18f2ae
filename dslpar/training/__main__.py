"""Entry point of `python -m dslpar.training --config FILE`, which launchers start on every rank."""

from __future__ import annotations

from dslpar.distributed.bootstrap import exit_process
from dslpar.training.main import main

if __name__ == "__main__":
    exit_process(main())
