"""Pages of the findings that only a run can make: what a machine has, what a class is, how ranks were started.

They are raised as `DslparError` where they are found; their codes count from 201 (TEN110: a layer asked for by mode).
"""

from __future__ import annotations

from typing import NamedTuple

from dslpar.errors import Severity


class RunTimePage(NamedTuple):
    """One finding of a run, and what `dslpar explain` prints of it."""

    code: str
    name: str
    page: str
    severity: Severity = "error"

    def text(self) -> str:
        """The page, with headings as rules have them."""
        return self.page.strip()


PAGES = (
    RunTimePage(
        "BAT201",
        "no-such-text",
        """
A file or folder of data.files is not there, or holds no text.

What it does:
    Looks for each name, relative to the config's folder, before processes meet.

Why:
    The linter reads configs, not data.

Use instead:
    data = dict(files=['corpus'])  # a folder beside the config
""",
    ),
    RunTimePage(
        "BAT202",
        "no-sequence-length",
        """
Nothing says how long a sample is.

What it does:
    Asks for data.seq_len where the model is a class that dslpar does not know.

Why:
    A known model has a max_seq_len; of another, nothing is known before it is built.

Use instead:
    data = dict(seq_len=128)
""",
    ),
    RunTimePage(
        "BAT203",
        "too-little-text",
        """
The text is shorter than one sample.

What it does:
    Compares the bytes to train on, and those held out, with seq_len + 1.

Why:
    Not one sample could be drawn.

Use instead:
    data = dict(seq_len=32)  # or more text, or a larger data.eval_fraction
""",
    ),
    RunTimePage(
        "CFG201",
        "not-a-model",
        """
The class that the model names is no model.

What it does:
    Imports the class, and checks that it is a torch.nn.Module or a dslpar.models.LayeredModel before it is called.

Why:
    The linter imports nothing.

Use instead:
    model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)
""",
    ),
    RunTimePage(
        "CKP201",
        "no-output-dir",
        """
The output_dir cannot be written to.

What it does:
    Makes the folder and writes config.yaml before the model is built.

Why:
    Better now than at the first checkpoint.

Use instead:
    train = dict(output_dir='outputs/second')  # or train.output_dir=... on the command line
""",
    ),
    RunTimePage(
        "HST201",
        "half-a-place",
        """
The environment says a part of where this process stands, and not the rest.

What it does:
    Checks that RANK and LOCAL_RANK are set where WORLD_SIZE is over 1.

Why:
    Ranks that guess would guess alike, and wait for each other.

Use instead:
    torchrun --nproc_per_node 8 train.py --config FILE  # a launcher sets all of them
""",
    ),
    RunTimePage(
        "HST202",
        "no-meeting-place",
        """
Ranks on several hosts, and no address of rank 0.

What it does:
    Asks for MASTER_ADDR where the launcher does not give it.

Why:
    The hosts could not find each other.

Use instead:
    mpirun -x MASTER_ADDR=node1 ... train.py --config FILE
""",
    ),
    RunTimePage(
        "HST203",
        "ranks-differ",
        """
A rank has another config, another text or other versions than rank 0.

What it does:
    Compares them over all ranks when the processes have met, before anything is built or written.

Why:
    Ranks that differ train nonsense, or wait for each other for ever. A config that was not copied to one host is
    enough, or another Python, whose standard library is another text.

Use instead:
    deepspeed --hostfile FILE train.py --config FILE  # the same files and packages on every host
""",
    ),
    RunTimePage(
        "PRE201",
        "no-such-precision-here",
        """
DeepSpeed does not run this precision on the machine's accelerator.

What it does:
    Asks DeepSpeed's accelerator before the model is built: many CPUs have no fp16.

Why:
    The linter does not know the machine.

Use instead:
    precision = 'bf16'
""",
    ),
    RunTimePage(
        "TEN110",
        "layer-of-another-mode",
        """
Linear1D, Linear2D, Linear2p5D or Linear3D in a run with another tensor mode.

What it does:
    Compares the mode in the layer's name with the run's when the layer is built.

Why:
    The names are ColossalAI's; its users choose a mode by the layer. Here the mesh chooses.

Use instead:
    Linear(groups, 256, 1024, role='inward')  # right in every mode
""",
    ),
    RunTimePage(
        "TEN111",
        "model-not-parallel",
        """
Tensor parallelism over a model that is a plain torch.nn.Module.

What it does:
    Checks, where the tensor size is over 1, that the class is a dslpar.models.LayeredModel.

Why:
    Each tensor rank would hold the whole model, and train it on the same samples.

Use instead:
    parallel = dict(tensor=1)
""",
    ),
)
