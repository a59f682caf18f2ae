"""An adversary on the second host of a two-host job: it trains undisturbed, and no process shows a secret."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from dslpar.watchdog.guard import SETTINGS
from dslpar.watchdog.receiver import read_variable
from dslpar.watchdog.status_page import StatusPage
from tests.support.hostile import MEMORY_BYTES, peak_bytes
from tests.support.runs import CONFIG, metrics, write_config
from tests.support.two_hosts import ROOT, Hosts, missing, two_hosts
from tests.system.test_strangers import STEPS, losses_undisturbed

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.prove]

ATTACK = """\
import sys
sys.path.insert(0, {root!r})
from dslpar.watchdog.authentication import Key
from tests.support.hostile import attack
attack({port}, {count}, Key({secret!r}, {service!r}) if {secret!r} else None, rank=2, address="10.77.0.10")
"""
NUM_STRINGS = 500


def environ_of(pid: int) -> dict[str, str]:
    return dict(text.partition("=")[::2] for text in Path(f"/proc/{pid}/environ").read_text().split("\0"))


def strike(hosts: Hosts, port: int, secret: str, service: str) -> None:
    """Attack from host1, as strangers and as rank 2's guard."""
    for known in ("", secret):
        code = ATTACK.format(root=str(ROOT), port=port, count=NUM_STRINGS, secret=known, service=service)
        done = hosts.run(1, [sys.executable, "-c", code])
        assert done.status == 0, done.output


@pytest.mark.parametrize("launcher", ["deepspeed", "openmpi", "torchrun"])
def test_a_job_on_two_hosts_among_strangers(tmp_path: Path, launcher: str) -> None:
    config, out = write_config(tmp_path, "parallel = dict(pipeline=2)\n" + CONFIG), tmp_path / "out"
    with two_hosts() as hosts:
        words = ["dslpar", "launch", str(config), "--hostfile", hosts.hostfile(2), "--launcher", launcher]
        words += ["train.steps=1000000", "train.log_interval=1000000", f"train.output_dir={out}"]
        job = hosts.start(0, words, tmp_path / "said")
        path = out / "metrics.jsonl"
        while not (path.exists() and path.stat().st_size):
            assert job.process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.1)
        (file,) = out.glob(".secret_*")
        secret = file.read_text()
        assert file.stat().st_mode & 0o777 == 0o600
        running = {pid: argv for host in (0, 1) for pid, argv in hosts.processes(host).items()}
        assert not [argv for argv in running.values() if secret in " ".join(argv)]
        guards = {pid: environ for pid in running if SETTINGS in (environ := environ_of(pid))}
        (reports,) = {environ["DSLPAR_REPORTS"] for environ in guards.values()}
        destination, found = read_variable(reports) or ("", "")
        assert found == secret
        settings = {pid: json.loads(environ[SETTINGS]) for pid, environ in guards.items()}
        (hub,) = [pid for pid in guards if settings[pid]["rank"] == 0]
        hub_port = StatusPage(Path(f"/proc/{hub}/fd/{settings[hub]['page']}")).port
        strike(hosts, hub_port, secret, "hub")
        strike(hosts, int(destination.rpartition(":")[2]), secret, "launch")
        assert peak_bytes(hub) < MEMORY_BYTES
        assert peak_bytes(job.pid) < MEMORY_BYTES
        while len(path.read_text().splitlines()) <= STEPS:
            assert job.process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.1)
        os.kill(job.pid, signal.SIGTERM)
        assert job.process.wait(60) == 75, (tmp_path / "said").read_text()
        assert list(out.glob(".secret_*")) == []
    losses = [line["loss"] for line in metrics(out)][:STEPS]
    assert losses == pytest.approx(losses_undisturbed(tmp_path, config, 4), rel=1e-6)
    text = (tmp_path / "said").read_text()
    assert text.count("refuses a connection from 10.77.0.11") == 2, "the hub, and dslpar launch"
    for word in ("is gone", "silent", "SIGKILL", "hangs"):
        assert word not in text
