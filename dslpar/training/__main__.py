"""Entry point of `python -m dslpar.training --config FILE`, which launchers start on every rank."""

from __future__ import annotations

import sys

from dslpar.core.requirements import explain_missing

if __name__ == "__main__":
    if missing := explain_missing("dslpar.training", "torch", "deepspeed"):
        sys.exit(missing)
    from dslpar.distributed.bootstrap import exit_process
    from dslpar.training.main import main

    exit_process(main())
