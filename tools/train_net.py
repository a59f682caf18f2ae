"""train.py under the name that LiBai's documentation gives it.

bash tools/train.sh tools/train_net.py configs/bert_large_pretrain.py 8 train.dist.tensor_parallel_size=2
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as Python does for train.py in that folder

from dslpar.core.requirements import explain_missing

if __name__ == "__main__":
    if missing := explain_missing("tools/train_net.py", "torch", "deepspeed"):
        sys.exit(missing)
    from dslpar.distributed.bootstrap import exit_process
    from dslpar.training.main import main

    exit_process(main())
