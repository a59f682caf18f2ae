import os
from pathlib import Path

BATCH_SIZE = int(os.environ.get("BATCH", 4))
DATA = Path("/data") / "train"
parallel = dict(pipeline=2, tensor=dict(size=2, mode="1d"))
