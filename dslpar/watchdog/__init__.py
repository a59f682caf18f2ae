"""Watchdog: end a failing job within seconds, and report which rank failed first and why.

A guard process runs beside each rank. All guards report to a hub, which is rank 0's guard. They read the ranks' status
pages, marks and signals. After the first failure they end all ranks, and report the failed rank's host, stage, step and
cause. Nothing here imports torch. Modules that a guard loads import only the standard library, so that a guard starts
in milliseconds.
"""
