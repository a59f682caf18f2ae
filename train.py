"""What launchers start: `deepspeed train.py --config configs/gpt_3d.py`; see dslpar/train.py."""

from dslpar.bootstrap import leave
from dslpar.train import main

if __name__ == "__main__":
    leave(main())
