"""What launchers start: `deepspeed train.py --config configs/gpt_3d.py`; see dslpar/training/main.py."""

from dslpar.distributed.bootstrap import exit_process
from dslpar.training.main import main

if __name__ == "__main__":
    exit_process(main())
