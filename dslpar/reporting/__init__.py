"""Output of a job: the run folder, the log, monitors, and the report of `dslpar show`.

In: a resolved `Job`, and the metrics of each step. Out: `config.yaml`, `metrics.jsonl`, `log.txt`, lines on the
terminal, DeepSpeed's monitors, and a layout as text or JSON. Nothing here imports torch.
"""
