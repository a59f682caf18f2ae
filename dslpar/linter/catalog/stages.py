"""Pages of what a run finds as a model is cut into stages, once it is built."""

from __future__ import annotations

from dslpar.linter.catalog.page import RunTimePage

PAGES = (
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
)
