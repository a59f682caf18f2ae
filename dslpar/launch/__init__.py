"""How a job starts: a launcher chosen and checked, its hosts visited before, and supervision until it has ended.

In: a resolved `Job`, a cluster, and the flags of `dslpar launch`. Out: the launcher's command, run to its end, and who
failed first if it fails. Nothing here imports torch: the launcher's ranks do.
"""
