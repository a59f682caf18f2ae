"""The data of a run: the corpus and its split, samples, their order by seed and step, and the loader.

In: the section `data` of a Job. Out: micro-batches of token ids, the same samples a step in every layout.
"""
