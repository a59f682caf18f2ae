"""Launch: check a launcher and its hosts, start the job, and supervise it until it ends.

Input: a resolved `Job`, a cluster, and the flags of `dslpar launch`. Output: the launcher's command, run to its end,
and the rank that failed first if the job fails. Nothing here imports torch; only the launcher's ranks do.
"""
