"""Layout: resolves a Spec and a world size to a `Job`, in which every value is decided.

The input is the typed sections (dslpar.schema). The output is a `Job` with its mesh, stages and batch, the divisibility
conditions of sizes, the partition into pipeline stages, the learning rate of each step, and DeepSpeed's config. This
package is plain Python without torch.
"""
