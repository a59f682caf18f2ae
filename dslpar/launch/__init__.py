"""Launch: check a launcher and its hosts, start the job, and supervise it until it ends.

Input: a resolved `Job`, a cluster, and the flags of `dslpar launch`. It runs the launcher's command to its end, and
reports the rank that failed first if the job fails. Nothing here imports torch; only the ranks do.
"""
