"""Training data: the corpus and its split, samples, their order by seed and step, and the loader.

The input is the section `data` of a Job. The output is micro-batches, with the same samples per step in every layout.
"""
