"""The arithmetic of sizes: a Spec and a world size become a `Job`, in which every value is decided.

In: the typed sections (dslpar.schema). Out: `Job` with its mesh, stages and batch, what must divide by what, the cut
over pipeline stages, the learning rate of each step, and the dict for DeepSpeed. Plain Python, no torch.
"""
