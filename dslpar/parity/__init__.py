"""Parity: check on CPU ranks that a config's layout computes what one process computes (`dslpar prove`).

    proof = prove(check(load("configs/gpt_3d.py"), world_size=8).job)
    proof.verdict                                  # "proved", "differs" or "refused"

The steps from a job of any world size to a certificate:

- `small_mesh` chooses small worlds that keep every parallel axis. `small_model` chooses model sizes that divide over
  the small axes. `shrink` combines both to a job in miniature and lists every change.
- `samples` makes inputs and labels for any model. `one_process` trains the model in double precision without DeepSpeed,
  and measures its rounding errors. `layout_ranks` trains the model under the layout, on forked ranks.
- `whole` merges the pieces of all ranks (a piece is a rank's shard of a tensor), `checks` compares, and `explain`
  describes a difference.
- `on_devices` instead proves the first step of a job on the job's own ranks: `device_reference` computes the whole
  model on one rank, with bounds from the rounding of the job's precision, and `gathered_gradients` compares each
  tensor.
- `certificate` writes the result as JSON, and checks later whether a certificate still applies to a config.

torchtitan and Megatron-LM test their own parallel layers against one process in the same way, gradient by gradient.
picotron and nanotron compare loss curves. Here the config is the user's, and bounds come from float32's rounding errors
in this model, not from a table.
"""
