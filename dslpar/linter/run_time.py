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
        "CFG209",
        "monitor-not-installed",
        """
A monitor is asked for whose package rank 0 does not have.

What it does:
    Looks for the packages tensorboard, wandb and comet_ml before anything is built, on the host that will write.

Why:
    DeepSpeed would fail when the engine is built. CSV needs no package.

Use instead:
    pip install tensorboard wandb
""",
    ),
    RunTimePage(
        "CFG212",
        "not-a-schedule",
        """
The class that lr_scheduler names is no schedule of steps.

What it does:
    Imports the class, and checks before it is called that it has step(), state_dict() and load_state_dict(), and that
    step() needs no argument.

Why:
    DeepSpeed steps the schedule after each optimizer step that was applied, and tells it nothing: one that watches a
    loss, as ReduceLROnPlateau does, would be given the batch size in its place.

Use instead:
    lr_scheduler = dict(type='CosineAnnealingLR', T_max=100)
""",
    ),
    RunTimePage(
        "CFG221",
        "not-registered",
        """
A name that no registry has.

What it does:
    Looks up models, layers and gradient handlers among those that the program has registered, layers in torch.nn too.

Why:
    Names are registered when the module that holds the class is imported.

Use instead:
    model = dict(type='my_package.my_module.MyModel')  # a full name needs no registry
""",
    ),
    RunTimePage(
        "CFG222",
        "registered-twice",
        """
Two classes under one name.

What it does:
    Refuses a second class for a name that a registry has, and says where the first one stands.

Why:
    The config would mean one or the other, by the order of imports.

Use instead:
    @MODELS.register_module(name='MyOtherModel')
""",
    ),
    RunTimePage(
        "CFG223",
        "wrong-arguments",
        """
A model or a layer is given arguments that its class does not take.

What it does:
    Compares the arguments with the class's signature, on every rank, before any layer is built.

Why:
    The class would fail on the stage that builds it, and the other ranks wait.

Use instead:
    dict(type='Linear', in_features=8, out_features=4)
""",
    ),
    RunTimePage(
        "CFG224",
        "not-a-handler",
        """
The class that gradient_handler names is no gradient handler.

What it does:
    Imports the class, and checks that it is a dslpar.BaseGradientHandler before it is called.

Why:
    It is called with the model and the optimizer, and then once a step.

Use instead:
    class MyHandler(dslpar.BaseGradientHandler): ...  # with handle_gradient(self)
""",
    ),
    RunTimePage(
        "CFG225",
        "not-an-optimizer",
        """
What a program gives as the optimizer is none, is not this model's, or leaves out parameters that are to be trained.

What it does:
    Looks for the model's parameters in the optimizer's groups, and for trainable ones that are in none.

Why:
    It would step nothing; or the gradient's norm, and with it clipping, would depend on the ZeRO stage. What is not to
    be trained has requires_grad=False.

Use instead:
    dslpar.initialize(config, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
""",
    ),
    RunTimePage(
        "CFG226",
        "scalar-parameter",
        """
A parameter without dims.

What it does:
    Looks at the parameters of the model when it is built.

Why:
    DeepSpeed sends weights to replicas as bytes, and fails on a tensor that has no dim.

Use instead:
    self.scale = nn.Parameter(torch.ones(1))
""",
    ),
    RunTimePage(
        "CFG227",
        "criterion-with-parameters",
        """
A criterion that has parameters of its own.

What it does:
    Looks at the parameters of a criterion that is a module.

Why:
    The optimizer, ZeRO and checkpoints know the model's parameters alone.

Use instead:
    dslpar.initialize(config, model=model, criterion=nn.CrossEntropyLoss())
""",
    ),
    RunTimePage(
        "CFG228",
        "statistics-recomputed",
        """
Activation checkpointing over a layer that keeps running statistics, such as BatchNorm.

What it does:
    Looks for such layers where activation_checkpoint is on, when the model is built.

Why:
    A checkpointed layer runs twice a step, and its statistics would move twice: another model in evaluation.

Use instead:
    model = dict(type='my_package.MyModel')  # with GroupNorm; or without activation_checkpoint
""",
    ),
    RunTimePage(
        "CFG229",
        "no-such-op",
        """
An optimizer of DeepSpeed's whose kernel there is not for this device, or which could not be built.

What it does:
    Makes the optimizer, which loads its kernel.

Why:
    FusedAdam, Lamb and Lion are kernels that DeepSpeed compiles for the device at hand; of some there is none for the
    CPU, and compilation needs a compiler.

Use instead:
    optimizer = dict(type='AdamW', lr=3e-4)
""",
    ),
    RunTimePage(
        "HST201",
        "half-a-place",
        """
The environment says a part of where this process stands, and not the rest.

What it does:
    Checks that RANK and LOCAL_RANK are set where WORLD_SIZE is over 1, and the same of OpenMPI's, MPICH's and Slurm's
    own variables.

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
    Asks for MASTER_ADDR where nobody knows it. deepspeed and torchrun give it, srun's list of nodes begins with it, and
    OpenMPI 5 is asked for rank 0's host, whose name every host must know. MPICH says nothing, nor does srun with
    --distribution=arbitrary.

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
A rank has another config, another text, another number of samples or other versions than rank 0.

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
        "HST204",
        "launcher-not-installed",
        """
The launcher's program is not on this host.

What it does:
    Looks for deepspeed, mpirun, srun or torchrun beside this Python, then in PATH.

Why:
    Nothing would start.

Use instead:
    dslpar launch CFG --launcher torchrun  # comes with torch
""",
    ),
    RunTimePage(
        "HST205",
        "mpi-of-another-kind",
        """
The mpirun of this host is not of the MPI that was asked for.

What it does:
    Asks `mpirun --version` whose it is.

Why:
    OpenMPI and MPICH take different flags, and ignore or misread each other's.

Use instead:
    dslpar launch CFG --launcher openmpi
""",
    ),
    RunTimePage(
        "HST206",
        "too-few-accelerators",
        """
More ranks on this host than it has accelerators.

What it does:
    Compares the ranks of this host with its NVIDIA devices, or those that CUDA_VISIBLE_DEVICES leaves.

Why:
    Two ranks would share a device, or wait for one that is not there.

Use instead:
    dslpar launch CFG --world-size 4  # or DS_ACCELERATOR=cpu
""",
    ),
    RunTimePage(
        "HST207",
        "localhost-among-hosts",
        """
A hostfile with several hosts, and one of them is localhost.

What it does:
    Checks the names of the hosts where there is more than one.

Why:
    localhost is another machine on each host: the ranks could not meet.

Use instead:
    node1 slots=8
""",
    ),
    RunTimePage(
        "HST208",
        "devices-by-name",
        """
CUDA_VISIBLE_DEVICES names devices by their UUID, and the launcher is DeepSpeed's.

What it does:
    Checks that the visible devices are numbers.

Why:
    DeepSpeed's launcher takes numbers, and would give its ranks the first devices instead.

Use instead:
    CUDA_VISIBLE_DEVICES=2,3 dslpar launch CFG
""",
    ),
    RunTimePage(
        "HST221",
        "weights-differ",
        """
Ranks have built the same modules with other weights.

What it does:
    Compares sums of the weights of an nn.Sequential, which every rank of a pipeline builds whole.

Why:
    Each stage comes from another rank: the model would be none that a seed gives.

Use instead:
    torch.manual_seed(0)  # before the model is built, on every rank
""",
    ),
    RunTimePage(
        "PIP201",
        "stages-exceed-layers",
        """
The pipeline has more stages than the model has layers.

What it does:
    Counts the layers when the model is there.

Why:
    A stage without parameters fails on its ranks alone, and the others hang (DeepSpeed's issue 1522).

Use instead:
    parallel = dict(pipeline=2)  # over two layers or more
""",
    ),
    RunTimePage(
        "PIP202",
        "cut-does-not-fit",
        """
The cut that the config asks for does not fit the model's layers.

What it does:
    Compares stage_ids, counts, method and layer_idx with the layers, once they are known.

Why:
    Each layer stands on one stage, each stage has one layer or more, and they run in order.

Use instead:
    parallel = dict(pipeline=dict(size=2, counts=[3, 2]))  # for a model of 5 layers
""",
    ),
    RunTimePage(
        "PIP203",
        "nothing-to-train",
        """
A stage has no parameter that is trained.

What it does:
    Looks for a parameter with requires_grad on each stage, and tells every rank.

Why:
    DeepSpeed makes an optimizer on each stage, and fails there alone; the others would hang.

Use instead:
    parallel = dict(pipeline=dict(size=2, method='parameters'))
""",
    ),
    RunTimePage(
        "PIP204",
        "one-module",
        """
A pipeline over a model that is one module.

What it does:
    Refuses to cut a torch.nn.Module that is no list of layers.

Why:
    What runs between its parts is in its forward, which nothing can cut.

Use instead:
    dslpar.initialize(run, model=dslpar.Stage(part))  # each rank its own part, by run.stage
""",
    ),
    RunTimePage(
        "PIP205",
        "shared-over-stages",
        """
One parameter of two modules that would stand on two stages.

What it does:
    Compares the parameters of an nn.Sequential's modules after the cut.

Why:
    Each stage would train a copy of its own.

Use instead:
    parallel = dict(pipeline=dict(size=2, counts=[1, 4]))  # both on one stage
""",
    ),
    RunTimePage(
        "PIP206",
        "single-pass-in-a-pipeline",
        """
engine(x) or engine.backward(loss) in a pipeline.

What it does:
    Refuses single passes where there are two stages or more.

Why:
    A pipeline's schedule moves all micro-batches of a step at once, forward and backward in turns.

Use instead:
    PipelineSchedule(num_microbatches=4).forward_backward_step(engine, data_iter)
""",
    ),
    RunTimePage(
        "PIP207",
        "other-num-microbatches",
        """
The schedule's num_microbatches is not the job's accumulation.

What it does:
    Compares the two before a step.

Why:
    They are the same number: the micro-batches of one optimizer step.

Use instead:
    batch = dict(accumulation=4)  # for PipelineSchedule(num_microbatches=4)
""",
    ),
    RunTimePage(
        "PIP208",
        "no-such-layer",
        """
The stage of a layer that is not there, or not known yet.

What it does:
    Looks up the layer in the cut, or in the stage_ids or counts of the config.

Why:
    How a model of the program's own is cut is known when it is there.

Use instead:
    run.get_layer_stage_id(-1)  # with parallel = dict(pipeline=dict(size=2, stage_ids=[0, 0, 1]))
""",
    ),
    RunTimePage(
        "PIP209",
        "no-chunks",
        """
More than one chunk of the model on each stage.

What it does:
    Refuses num_chunks over 1.

Why:
    The interleaved schedule, which runs several chunks a stage, is not there yet.

Use instead:
    build_pipeline_model_from_cfg(cfg)  # num_chunks=1
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
    RunTimePage(
        "ZER201",
        "optimizer-not-for-shards",
        """
ZeRO over an optimizer of which it is not known that it acts elementwise.

What it does:
    Looks up the class of an optimizer that a program gives.

Why:
    ZeRO gives each rank a piece of a tensor: an optimizer that looks at whole tensors would compute something else.

Use instead:
    deepspeed = dict(zero_allow_untested_optimizer=True)  # if it does act elementwise
""",
    ),
)
