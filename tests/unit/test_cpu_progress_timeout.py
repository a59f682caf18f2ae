"""The tests' time-out: it ends an idle test, and none that works or is kept from working."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support import cpu_progress_timeout
from tests.support.waiting import wait, wait_until

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def quick() -> Iterator[None]:
    """Replace this test's time-out by one of a second."""
    cpu_progress_timeout.start_timer(limit_s=60, idle_s=1, interval_s=0.1)
    yield
    cpu_progress_timeout.stop_timer()


@pytest.mark.usefixtures("quick")
def test_a_test_in_which_nothing_happens_is_ended() -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"nothing has happened for 1 s, here and in 1 processes below\n"
    ) as error:
        subprocess.run(SLEEPS)
    assert "in test_a_test_in_which_nothing_happens_is_ended" in str(error.value)


@pytest.mark.prove  # the tests' own tool, for seconds
@pytest.mark.usefixtures("quick")
def test_a_test_that_works_is_not_ended() -> None:
    ends = time.process_time() + 1.5
    while time.process_time() < ends:
        pass
    code = "import time\nwhile time.process_time() < 1.5: pass"
    assert subprocess.run([sys.executable, "-S", "-c", code]).returncode == 0


def test_an_endless_loop_ends_at_the_limit() -> None:
    cpu_progress_timeout.start_timer(limit_s=0.3, idle_s=60, interval_s=0.1)
    with pytest.raises(pytest.fail.Exception, match=r"no end after 0.3 s"):
        _loop()


def _loop() -> None:
    while True:
        pass


def test_every_test_has_the_timer() -> None:
    import signal

    assert signal.getitimer(signal.ITIMER_REAL)[1] == cpu_progress_timeout._INTERVAL_S


def test_waiting_ends_when_the_others_do_nothing() -> None:
    with subprocess.Popen(SLEEPS) as process:
        with pytest.raises(AssertionError, match=r"hangs$"):
            wait(process, idle_s=0.5)
        process.kill()
    with pytest.raises(AssertionError, match=r"^nobody comes$"):
        wait_until(lambda: False, lambda: "nobody comes", idle_s=0.2)
    wait_until(lambda: os.getpid(), "at once")
