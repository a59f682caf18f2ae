"""Pages of what a run finds in its data: text, batches and the order of steps."""

from __future__ import annotations

from dslpar.linter.catalog.page import RunTimePage

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
        "BAT204",
        "other-micro-batches",
        """
The micro-batches of a step are not as many, or not as large, as the job says.

What it does:
    Counts the micro-batches that the engine is given, and their samples, before anything is sent.

Why:
    A pipeline sends pieces of one shape, and the loss is a mean of equal shares: another size would hang, or be wrong.

Use instead:
    batch = dict(micro_size=8, accumulation=2)  # and two micro-batches of 8 samples a step
""",
    ),
    RunTimePage(
        "BAT205",
        "not-tensors",
        """
A micro-batch holds something that is no tensor, or labels in a tuple where cross-entropy is the loss.

What it does:
    Looks at the inputs and labels that the engine is given.

Why:
    They go to the device, and through a pipeline, as tensors or tuples of tensors.

Use instead:
    engine.train_batch([(x, y)])  # x and y tensors, or tuples of them
""",
    ),
    RunTimePage(
        "BAT206",
        "step-out-of-order",
        """
backward() or step() at a moment when it means nothing.

What it does:
    Checks that each step() follows one backward(loss) or forward_backward(), and each of these the step() before.

Why:
    A share of the gradient would be lost or counted twice, in silence.

Use instead:
    engine.backward(engine.criterion(engine(x), y)); engine.step()  # for each micro-batch
""",
    ),
    RunTimePage(
        "BAT207",
        "no-pairs",
        """
The data set is empty, or its items are no pairs.

What it does:
    Looks at the first item of a map-style data set.

Why:
    A micro-batch is made of (input, label) pairs.

Use instead:
    dslpar.initialize(config, train_data=[(x, y), ...])
""",
    ),
    RunTimePage(
        "BAT208",
        "data-ended",
        """
The data ended in the middle of a step.

What it does:
    Counts the micro-batches that a schedule draws from an iterator.

Why:
    A step takes all of its micro-batches, or none.

Use instead:
    DataLoader(..., drop_last=True)  # and a multiple of num_microbatches batches
""",
    ),
    RunTimePage(
        "BAT209",
        "second-schedule-step",
        """
The program steps the schedule of the learning rate.

What it does:
    Refuses lr_scheduler.step(), which ColossalAI's programs call.

Why:
    The engine steps the schedule at each optimizer step; a second time, the rate would run down twice as fast.

Use instead:
    engine.step()  # and no lr_scheduler.step()
""",
    ),
)
