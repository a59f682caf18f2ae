"""What a trained model is used for: generating text, and measuring what it has learned, on any layout.

In: the folder of a run, or a checkpoint. Out: tokens and text; loss, perplexity, accuracy. `trained` says what is to be
read on which layout, without torch; `model` is this rank's part of it, its weights straight from the checkpoint's
files, without DeepSpeed or an optimizer; `generation` and `evaluation` run it, and `commands` are the two programs.
"""
