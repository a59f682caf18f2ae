"""Inference with trained models on any layout: generate text, and evaluate on held-out data.

The input is the folder of a run, or of a checkpoint. The output is tokens and text, or loss, perplexity and accuracy.

- `trained` selects the checkpoint and the layout, without torch.
- `model` builds this rank's pipeline stage of the model. It reads weights straight from the checkpoint's files, without
  DeepSpeed or an optimizer.
- `generation` and `evaluation` run the model, and `commands` implements `dslpar generate` and `dslpar eval`.
"""
