"""Parity: whether a config's layout computes what one process computes, tried on CPU ranks. `dslpar prove` is this.

    proof = prove(check(load("configs/gpt_3d.py"), world_size=8).job)
    proof.verdict                                  # "proved", "differs" or "refused"

From a job of any world to a certificate:

- `small_mesh` chooses small worlds that keep every axis, `small_model` sizes that divide there, `shrink` a job of both,
  with every change by name;
- `samples` makes inputs and labels of any model; `one_process` trains it in double precision without DeepSpeed, and
  measures what rounding does to it; `layout_ranks` trains it under the layout, on ranks that it forks;
- `whole` puts the pieces of all ranks together, `checks` compares, `explain` says what a difference looks like;
- `on_devices` proves the first step of a job on its own ranks instead: `device_reference` computes the whole model on
  one of them, with bounds by the rounding of the job's precision, and `gathered_gradients` compares tensor by tensor;
- `certificate` is the result as JSON, and tells later whether it still speaks of a config.

That a layout is compared with one process, gradient by gradient, is how torchtitan and Megatron-LM test their own
parallel layers; picotron and nanotron compare curves of losses. Here the config is the user's, and bounds come from
what float32 does to this very model, not from a table.
"""
