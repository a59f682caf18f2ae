"""How a job that fails ends: a guard process beside each rank, the hub that they report to, and who failed first.

In: the ranks' status pages, marks and signals. Out: the end of all ranks within seconds of the first failure, and a
report that names its rank, host, stage, step and cause. Nothing here imports torch, and what a guard loads only the
standard library: it starts in milliseconds.
"""
