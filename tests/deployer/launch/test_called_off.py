"""A launch that is interrupted, at each moment: what it says is what is known, and nothing after it says otherwise."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from deployer.commands.launch.run import follow_through
from deployer.commands.screen import Screen
from deployer.connection.host import Host
from deployer.jobs.registry import JobRecord, read_records
from deployer.launch.follow import Watcher
from deployer.launch.start import launch_and_follow
from deployer.plan.options import Options, read_config
from deployer.plan.prepare import Prepared, prepare
from deployer.transport.local import LocalTransport
from tests.support.ferry import Ferry
from tests.support.lying import Lying

CANCELLED = "import os; frame({{'hello': {{}}}}); os.kill({pid}, 2)\nwhile 'cancel' not in hear(): pass\n"
"""Of a host that was asked, presses Ctrl-C, and hears that nobody wants the answer."""
ACK = "event('ack', {'job_id': 'j', 'path': '/job', 'stopping': True})\n"
ACK += "frame({'id': 0, 'error': {'message': 'cancelled'}})\n"


class Told(Watcher):
    """Passes on to the screen what a launch tells, and presses Ctrl-C when it tells this."""

    def __init__(self, screen: Screen, at: str) -> None:
        self.screen, self.at = screen, at

    def _tell(self, name: str, *args: Any) -> None:
        getattr(self.screen, name)(*args)
        if name == self.at:
            self.at = ""
            os.kill(os.getpid(), signal.SIGINT)  # to the main thread, whoever tells it

    def asking(self) -> None:
        self._tell("asking")

    def refused(self) -> None:
        self._tell("refused")

    def sending(self, sent: int, total: int) -> None:
        self._tell("sending", sent, total)

    def started(self, ack: dict[str, Any]) -> None:
        self._tell("started", ack)

    def heard(self) -> None:
        self._tell("heard")


class Pressed(LocalTransport):
    """Ctrl-C while it connects, or once the host has been asked."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def connect(self) -> None:
        if self.at == "connecting":
            signal.raise_signal(signal.SIGINT)

    def open(self, command: str) -> Any:
        stream = super().open(command)
        if self.at == "asked":
            signal.raise_signal(signal.SIGINT)
        return stream


def launch(folder: Path, host: Host, at: str = "") -> tuple[int, Prepared]:
    options = Options(command=("sleep", "1000"))
    prepared = prepare(read_config(options), options=options, project=folder)
    plan = prepared.plan
    record = JobRecord(plan.job_id, plan.name, None, host.root, str(folder / "results"), plan.created)

    def start(screen: Screen, view: Any) -> Any:
        return launch_and_follow(
            host.connect, plan, shipment=prepared.shipment, payload={}, git=None, view=view, watcher=Told(screen, at)
        )

    code = follow_through(start, host, record, bare=True, detach=False, as_json=False, pull_limit=None, pulls=True)
    return code, prepared


@pytest.fixture
def project(ferry: Ferry) -> Path:
    (ferry.project / "data").write_bytes(os.urandom(3_000_000))
    return ferry.project


def jobs_of(root: Path) -> list[str]:
    return [path.name for path in (root / "jobs").iterdir()] if (root / "jobs").exists() else []


@pytest.mark.parametrize("at", ["connecting", "sending"])
def test_before_anything_can_run_nothing_was_started(project, tmp_path, capfd, at):
    host = Host(None, str(tmp_path / "root"), begun=Pressed(at))
    code, _ = launch(project, host, at)
    said = capfd.readouterr().err.splitlines()
    assert (code, said[-1]) == (130, "cancelled: nothing was started")
    assert jobs_of(tmp_path / "root") == [] and read_records() == []


@pytest.mark.parametrize("is_gone", [False, True], ids=["no word from the host", "the host is gone"])
def test_host_that_has_not_answered_may_have_started_it_and_that_is_said(project, tmp_path, capfd, is_gone):
    begun = Lying(CANCELLED.format(pid=os.getpid())) if is_gone else Pressed("asked")
    code, prepared = launch(project, Host(None, str(tmp_path / "root"), begun=begun))
    job_id, said = prepared.plan.job_id, capfd.readouterr().err
    assert code == 75 and "nothing was started" not in said
    assert f"cancelled, but this machine has not said whether {job_id} was started" in said
    assert said.rstrip().endswith(f"stop {job_id} stops it") and [r.job_id for r in read_records()] == [job_id]


def test_job_that_its_host_stops_at_once_is_neither_running_nor_never_started(project, tmp_path, capfd):
    begun = Lying(CANCELLED.format(pid=os.getpid()) + ACK + "forever()")
    code, prepared = launch(project, Host(None, str(tmp_path / "root"), begun=begun))
    said = capfd.readouterr().err.splitlines()
    assert code == 130 and said[-1].startswith(f"cancelled: {prepared.plan.job_id} had just begun, its host stops it")


def test_acknowledgement_that_is_damaged_does_not_mean_that_nothing_was_started(project, tmp_path, capfd):
    begun = Lying(CANCELLED.format(pid=os.getpid()) + ACK.replace("'/job'", "5") + "forever()")
    code, prepared = launch(project, Host(None, str(tmp_path / "root"), begun=begun))
    assert code == 75 and [record.job_id for record in read_records()] == [prepared.plan.job_id]
    assert "cancelled: nothing was started" not in capfd.readouterr().err


@pytest.mark.parametrize("at", ["started", "heard"])
def test_job_that_has_begun_goes_on(project, tmp_path, capfd, ferry, at):
    code, prepared = launch(project, Host(None, str(ferry.root)), at)
    said = capfd.readouterr().err
    assert code == 75 and "nothing was started" not in said
    assert f"{prepared.plan.job_id} is running; it goes on without this client" in said
    assert ferry.run("stop", prepared.plan.job_id, "--grace", "0").returncode == 0
