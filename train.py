"""What launchers start: `deepspeed train.py --config configs/gpt_3d.py`; see dslpar/training/main.py."""

from dslpar.distributed.bootstrap import leave
from dslpar.training.main import main

if __name__ == "__main__":
    leave(main())
