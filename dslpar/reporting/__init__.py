"""Output of a job: the run folder, the log, monitors, and the report of `dslpar show`.

In: a resolved `Job`, and the metrics of each step. Out: `config.yaml`, `metrics.jsonl`, `log.txt`, lines on the
terminal, DeepSpeed's monitors, and a layout as text or JSON. From the folders of runs: how each of them stands
(`run_list`), and its curves (`curves`) as SVG, PNG or characters. Nothing here imports torch.
"""
