"""Pages of what a run, or `dslpar checkpoint`, finds about output folders and checkpoints."""

from __future__ import annotations

from dslpar.linter.catalog.page import RunTimePage

PAGES = (
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
        "CKP211",
        "output-dir-in-use",
        """
Another run writes to the output_dir.

What it does:
    Rank 0 of a run that trains locks the folder (its file .lock) until its process is gone, however that ends. Where
    another one has the lock it says whose, waits for 100 s, and then ends the job.

Why:
    Two runs in one folder move, prune and remove what the other writes. It happens where a job is queued again while
    its ranks are still being ended, and where a line is typed twice. On a file system without locks nobody can tell,
    and the run says so as it starts.

Use instead:
    train = dict(output_dir='outputs/second')  # or train.output_dir=... on the command line
""",
    ),
    RunTimePage(
        "CKP217",
        "weight-out-of-range",
        """
A weight is too large for the type that it is to be exported in.

What it does:
    `dslpar checkpoint export --dtype fp16` looks at each tensor as it is written, and leaves no folder behind.

Why:
    fp16 ends at 65,504: what is larger becomes infinite, and the model gives no number.

Use instead:
    dslpar checkpoint export outputs/gpt --output weights --dtype bf16
""",
    ),
    RunTimePage(
        "CKP202",
        "checkpoint-of-another-run",
        """
The checkpoint belongs to another model, kind of optimizer, text, seed or global batch than the config asks for.

What it does:
    Compares the config that the manifest holds with the one of now, on every rank, before anything is built. Lists all
    that would make another run, with what to write. The layout is free: parallel, zero, micro_size, accumulation,
    recomputation. What takes effect (optimizer.lr, clipping, dropout, precision, train.steps, ...) may change as well,
    and is told with both values.

Why:
    Weights and an optimizer's state fit the model and the class that made them, and the position in the data means
    something for one text, seed and batch alone. Under a schedule of torch's or DeepSpeed's, optimizer and lr_scheduler
    are fixed as well: it keeps their values in its own state.

Use instead:
    python train.py --config outputs/gpt/config.yaml --resume train.steps=200  # the run's own record, and more steps
""",
    ),
    RunTimePage(
        "CKP203",
        "checkpoint-not-everywhere",
        """
Rank 0 sees a checkpoint that another host does not see.

What it does:
    Looks for the checkpoint on every rank, before anything is built.

Why:
    Each rank reads its own part. A host that began afresh would train another model.

Use instead:
    train = dict(output_dir='/shared/outputs/gpt')  # a file system that all hosts share
""",
    ),
    RunTimePage(
        "CKP204",
        "checkpoint-of-a-later-version",
        """
The checkpoint has a format that this dslpar does not know yet.

What it does:
    Reads the format's number in checkpoint.json first.

Why:
    A later dslpar may keep what this one would leave out.

Use instead:
    pip install --upgrade dslpar
""",
    ),
    RunTimePage(
        "CKP205",
        "no-checkpoint",
        """
A checkpoint cannot be written, the folder of checkpoints cannot be read, or all that are there are damaged.

What it does:
    Writes under a name that ends in .part, and renames the folder when every rank's files are on disk; what one rank
    could not write is told to all. On --resume, reads every byte and compares it with the manifest.

Why:
    A full disk ends the run with the last whole checkpoint untouched. A run whose checkpoints are all damaged must not
    begin anew without a word.

Use instead:
    checkpoint = dict(keep=2)  # or train.output_dir=... where there is room
""",
    ),
    RunTimePage(
        "CKP206",
        "nothing-to-evaluate",
        """
--eval-only, and output_dir holds no checkpoint.

What it does:
    Looks for the newest checkpoint below train.output_dir, or the one of checkpoint.resume_from.

Why:
    The loss of initial weights is not what was asked for.

Use instead:
    python train.py --config outputs/gpt/config.yaml --eval-only  # the record of a run names its folder
""",
    ),
    RunTimePage(
        "CKP207",
        "other-weights",
        """
Weights that are to be loaded are not those of the model: a name is missing or unknown, or a shape differs.

What it does:
    Compares the names and whole shapes of all tensors with those of the model, before one of them is changed.

Why:
    A weight that is left as it was drawn spoils a model that seems to be loaded.

Use instead:
    load_full_state(module, full, groups, strict=False)  # where only a part is to be loaded
""",
    ),
    RunTimePage(
        "CKP208",
        "checkpoint-does-not-fit",
        """
A checkpoint does not hold the tensors of the model that was built, or a file of it cannot be read.

What it does:
    Compares names and whole shapes of all parameters with the index, on every rank, and reads what this rank holds.

Why:
    A config may name a class that has changed since. A weight that stays as it was drawn would spoil the run.

Use instead:
    model = dict(type='my_pkg.Net', width=64)  # the class and the arguments that were saved
""",
    ),
    RunTimePage(
        "CKP209",
        "no-such-checkpoint",
        """
checkpoint.resume_from names a checkpoint that is not there.

What it does:
    Looks for a name in the run's checkpoints, and for what has a '/' in it as a path.

Why:
    A run that begins at step 0 instead is not what was asked for.

Use instead:
    checkpoint = dict(resume_from='step_000100')  # `dslpar checkpoint list OUTPUT_DIR` prints those that are there
""",
    ),
    RunTimePage(
        "CKP210",
        "resume-from-unused",
        """
checkpoint.resume_from names a checkpoint, and the run loads none.

What it does:
    Looks for --resume and --eval-only on the command line, before anything starts. The policies 'newest' and
    'newest_whole' may stand in a config: they choose among what there is.

Why:
    The run starts at step 0, in a folder that is set aside or new.

Use instead:
    python train.py --config configs/gpt_3d.py --resume checkpoint.resume_from=step_000100
""",
        "warning",
    ),
    RunTimePage(
        "CKP215",
        "damaged-checkpoint",
        """
Files of a checkpoint are missing, cut short or altered.

What it does:
    Reads every byte of the checkpoint before anything is built, each rank its share of the files, and compares lengths
    and checksums with the manifest. Names each damaged file, and the newest checkpoint that is whole.

Why:
    A weight with a flipped bit trains on, and shows nothing. To go back by itself would hide that a disk is failing.

Use instead:
    checkpoint = dict(resume_from='step_000100')  # once; or 'newest_whole', for jobs that nobody watches
""",
    ),
    RunTimePage(
        "CKP216",
        "unreadable-checkpoint-file",
        """
A file of a checkpoint is not what its index says.

What it does:
    Checks the header of a tensor file and the index whenever one of them is opened.

Why:
    It was put there by something else, or has changed since it was verified.

Use instead:
    dslpar checkpoint verify outputs/gpt  # names every damaged file
""",
    ),
    RunTimePage(
        "CKP220",
        "checkpoint-of-an-earlier-version",
        """
The checkpoint was written by an earlier dslpar, in DeepSpeed's own files.

What it does:
    Reads the format's number in checkpoint.json first.

Why:
    Format 1 fits the one layout that wrote it, and its files say nothing of how 2D, 2.5D and 3D weights are cut.

Use instead:
    pip install 'dslpar==0.1.0'  # to finish that run; or a new one, from its weights
""",
    ),
    RunTimePage(
        "CKP221",
        "already-there",
        """
`dslpar checkpoint reshard` or `export` would write where something is.

What it does:
    Looks at the output first. What is written stands under a temporary name until all of it is on disk.

Why:
    A checkpoint that is written over is one that cannot be gone back to.

Use instead:
    dslpar checkpoint export outputs/gpt --output weights/step_100  # a folder that is not there
""",
    ),
)
