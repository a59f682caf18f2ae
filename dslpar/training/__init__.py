"""The training program that launchers start on every rank: `python -m dslpar.training --config FILE`, or train.py.

In: a command line and the environment of a launcher. Out: a run folder (metrics, log, checkpoints) and an exit status.
`main` prepares a rank and ends it, `loop` takes the steps, `consistency` makes sure that all ranks run the same job.
"""
