"""Pages of what tensor-parallel layers find in their sizes, inputs and weights."""

from __future__ import annotations

from dslpar.linter.catalog.page import RunTimePage

PAGES = (
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
    RunTimePage(
        "TEN221",
        "activation-does-not-divide",
        """
An activation of your own, or ids, that the ranks of a tensor group cannot share out in equal pieces.

What it does:
    Divides each dim of what enters `to_residual` or `to_inner`, and of an Embedding's ids, by the ranks that cut it.

Why:
    The linter knows the dims of GPT; those of other models are known when they run. Of ids it is often the last
    micro-batch of a data set: leave it out (drop_last=True).

Use instead:
    x = torch.nn.functional.pad(x, (0, 0, 0, 1))  # one more token: 16 x 16 patches and a class token are 257
""",
    ),
    RunTimePage(
        "TEN222",
        "outside-the-vocabulary",
        """
A token or a label that is no entry of the vocabulary.

What it does:
    Looks at all ids and labels of a micro-batch, on every rank; on a GPU the device itself stops, as in torch.

Why:
    A rank that holds a part of the vocabulary would look the token up, find it elsewhere, and go on with zeros.

Use instead:
    model = dict(type='GPT', vocab_size=50257)  # of the tokenizer; labels that do not count are -100
""",
    ),
    RunTimePage(
        "TEN223",
        "wrong-mask",
        """
A padding mask that is not bool [batch, sequence] of the whole micro-batch.

What it does:
    Compares the mask that a layer is called with to its input, with the pieces of all ranks of the tensor group.

Why:
    As ids and labels, a mask enters whole on every rank, and the layers slice it. Of integers, "not" is another number.

Use instead:
    block(x, mask=ids != pad_id)
""",
    ),
    RunTimePage(
        "TEN224",
        "no-such-layer-option",
        """
A norm, an activation or a role that no layer has.

What it does:
    Looks up the names that `Form`, `MLP` and `Linear` are given.

Why:
    The linter checks those of GPT; a model of your own is known when it is built.

Use instead:
    Block(groups, 256, 8, form=Form(norm='rmsnorm', activation='swiglu'))
""",
    ),
    RunTimePage(
        "TEN225",
        "no-such-loss",
        """
A cross-entropy that does not exist: another reduction, or a label smoothing outside 0 to 1.

What it does:
    Checks the arguments of `dslpar.layers.cross_entropy` at each call.

Why:
    The ranks compute their parts themselves, so torch never sees these arguments.

Use instead:
    cross_entropy(groups, logits, labels, vocab_size, reduction='none', label_smoothing=0.1)
""",
    ),
    RunTimePage(
        "TEN226",
        "wrong-shape",
        """
A layer, a loss or a door is given a tensor of a shape that it does not take.

What it does:
    Looks at the dims of activations and ids; compares labels with logits, and sequences with the table of positions.

Why:
    Each rank takes its own part of what is whole. From a tensor of other dims it would take the wrong one: labels that
    are flattened, of logits that are not, belong to other tokens where the sequence is split, and the loss is wrong
    without a word.

Use instead:
    loss = cross_entropy(groups, logits, labels, vocab_size)  # [batch, sequence, ...] both, or [tokens, ...] both
""",
    ),
    RunTimePage(
        "TEN227",
        "weight-does-not-divide",
        """
A layer of a model of your own, whose features the ranks cannot share out in equal pieces.

What it does:
    Divides each dim of a parameter, and each of a linear's blocks, by the ranks that cut it, when the layer is made.

Why:
    The linter knows the sizes of GPT; those of other models are known when they are built.

Use instead:
    MLP(groups, 256, 1024)  # features that are multiples of the tensor size, and of its axes' products
""",
    ),
    RunTimePage(
        "TEN231",
        "no-such-mesh",
        """
A DeviceMesh over axes that do not exist, or that overlap.

What it does:
    Checks the names that `run.device_mesh` is given.

Why:
    A rank has one place on each axis; "tensor" is d, q, y and z together, and "x" is d and q.

Use instead:
    mesh = run.device_mesh('data', 'tensor')
""",
    ),
    RunTimePage(
        "TEN232",
        "placements-do-not-fit",
        """
Placements of a tensor of your own that do not fit the mesh or the tensor.

What it does:
    Counts them against the dims of the mesh, and looks up the dims that they split.

Why:
    Each dim of the mesh needs to know what happens to the tensor there.

Use instead:
    run.distribute(noise, run.get_nd_sbp([split(0), split(1)]))
""",
    ),
    RunTimePage(
        "TEN233",
        "blocks-are-no-shards",
        """
A parameter of several blocks (queries, keys, values; gate, up) asked for as a DTensor.

What it does:
    Looks at the placement of what `as_dtensor` is given.

Why:
    Each rank holds a part of each block, which lie apart in the full weight; a DTensor's pieces are contiguous.

Use instead:
    full = dslpar.layers.gather(p, dslpar.layers.placement_of(p), run.groups)
""",
    ),
)
