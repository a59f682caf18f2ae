"""Pages of what a run finds in classes by name, once they are imported: their kind, arguments and numbers."""

from __future__ import annotations

from dslpar.linter.catalog.page import RunTimePage

PAGES = (
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
