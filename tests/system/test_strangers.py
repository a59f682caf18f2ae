"""An adversary on the job's host: the job trains undisturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.faults import processes_with
from dslpar.watchdog.authentication import Key
from dslpar.watchdog.guard import SETTINGS
from tests.support.forked_training import start_job
from tests.support.hostile import MEMORY_BYTES, attack, peak_bytes
from tests.support.runs import BIN, CONFIG, metrics, write_config
from tests.support.waiting import wait_until

STEPS = 30
"""Steps whose losses are compared."""
NUM_STRINGS = 5_000


def losses_undisturbed(folder: Path, config: Path, world: int) -> list[float]:
    """Return the losses of the same ranks, forked here without an adversary."""
    words = ["--config", str(config), f"train.output_dir={folder / 'alone'}", f"train.steps={STEPS}"]
    with start_job(world, words, folder / "said") as job:
        assert job.wait(120) == [0] * world, (folder / "said").read_text()
    return [line["loss"] for line in metrics(folder / "alone")]


def guards(mark: str) -> dict[int, tuple[int, dict[str, Any]]]:
    """Return process and settings of each guard of a job, by rank."""
    found = {}
    for pid in processes_with(mark):
        environ = dict(text.partition("=")[::2] for text in Path(f"/proc/{pid}/environ").read_text().split("\0"))
        if SETTINGS in environ:
            settings = json.loads(environ[SETTINGS])
            found[settings["rank"]] = (pid, settings)
    return found


@pytest.mark.prove
def test_a_job_trains_on_among_strangers_and_guards_gone_mad(tmp_path: Path) -> None:
    """torchrun's ranks meet at the host's name, but their guards listen on the loopback alone."""
    config, mark = write_config(tmp_path, CONFIG), f"STRANGERS={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    environ = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", name: value}
    words = ["launch", str(config), "--launcher", "torchrun", "--world-size", "2", "train.steps=1000000"]
    with open(tmp_path / "said", "wb") as said:
        job = subprocess.Popen(
            [str(BIN / "dslpar"), *words, "train.log_interval=1000000", f"train.output_dir={tmp_path / 'out'}"],
            env=environ,
            stdout=said,
            stderr=said,
        )
    try:
        path = tmp_path / "out" / "metrics.jsonl"
        wait_until(lambda: path.exists() and path.stat().st_size, (tmp_path / "said").read_text)
        pid, settings = guards(mark)[0]
        listening = [one.laddr for one in psutil.Process(pid).net_connections("inet") if one.status == "LISTEN"]
        assert [address.ip for address in listening] == ["127.0.0.1"]
        attack(listening[0].port, NUM_STRINGS, None)
        attack(listening[0].port, NUM_STRINGS, Key(settings["secret"], "hub"))
        assert all(peak_bytes(pid) < MEMORY_BYTES for pid, _ in guards(mark).values())
        while len(path.read_text().splitlines()) <= STEPS:
            assert job.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 75, (tmp_path / "said").read_text()
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)
        job.wait(10)
    losses = [line["loss"] for line in metrics(tmp_path / "out")][:STEPS]
    assert losses == losses_undisturbed(tmp_path, config, 2)
    text = (tmp_path / "said").read_text()
    assert text.count("refuses a connection from 127.") == 1
    assert text.count("closes the connection to that of rank 1") == 1
    for word in ("gone", "silent", "SIGKILL", "hangs"):
        assert word not in text


@pytest.mark.prove
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "tools/train.sh"])
def test_a_config_error_under_a_bare_launcher_is_told_as_one(tmp_path: Path, launcher: str) -> None:
    """Ranks that the launcher then ends while they start are not reported as victims."""
    config = str(write_config(tmp_path, CONFIG.replace("SGD", "SGDX")))
    commands = {
        "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "3", "train.py", "--config", config],
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "3", "train.py", "--config", config],
        "tools/train.sh": ["bash", "tools/train.sh", "train.py", config, "3"],
    }
    environ = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(commands[launcher], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 1
    assert done.stdout.count("CFG108 unknown-choice: unknown optimizer 'SGDX'") == 1
    for text in ("was the first to end", "out-of-memory killer", "Stack (most recent call first)", "<frozen importlib"):
        assert text not in done.stdout
