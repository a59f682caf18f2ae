"""`python -m dslpar COMMAND`, as launchers start it on every rank: `torchrun -m dslpar generate RUN ...`."""

from __future__ import annotations

import sys

from dslpar.cli.main import run


def main() -> None:
    """Run the command; a rank ends without the C++ destructors of torch, which may abort."""
    # DeepSpeed's launcher puts it before the command.
    ranks = [word for word in sys.argv[1:2] if word.startswith(("--local_rank=", "--local-rank="))]
    sys.argv[1:] = [*sys.argv[1 + len(ranks) :], *ranks]
    try:
        run()
    except SystemExit as ended:
        if "torch" not in sys.modules:
            raise
        from dslpar.distributed.bootstrap import exit_process  # only ranks need it

        exit_process(int(ended.code or 0))


if __name__ == "__main__":
    main()
