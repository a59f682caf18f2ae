"""How a job that fails ends: a guard process beside each rank, the hub that they report to, and who failed first.

In: the ranks' status pages and signals. Out: the end of all ranks within seconds of the first failure, and a report
that names its rank, host, stage, step and cause. Nothing here imports torch: a guard starts in milliseconds.
"""
