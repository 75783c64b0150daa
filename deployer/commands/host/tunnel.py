"""`tunnel`: forwards a port of this machine to a port of a job's host."""

from __future__ import annotations

import json
import shlex

from deployer import terminal
from deployer.agent.job.status import FINAL
from deployer.agent.job.views import JobView
from deployer.commands.screen import ending_in_order
from deployer.commands.values import Ports
from deployer.connection.host import Host
from deployer.connection.link import Link
from deployer.errors import HostError, UsageError
from deployer.forward.tunnel import LOOPBACK, Tunnel, listen
from deployer.printable import shown


def tunnel(host: Host, job_id: str | None, ports: Ports, *, give_up_s: float, as_json: bool) -> int:
    """Forwards until Ctrl-C, which is the normal end, and returns 0."""
    local, remote = ports
    job = job_id or (f"--ssh {shlex.quote(host.ssh)}" if host.ssh else "")
    if host.ssh is None and local == remote:
        raise UsageError(
            f"port {remote} is one of this machine already: http://{LOOPBACK}:{remote}",
            hint=f"deploy.py tunnel {job} 0:{remote} gives it a second number",
        )
    listener = listen(local, instead=lambda port: f"deploy.py tunnel {job} {port}:{remote}")
    try:
        with listener, ending_in_order():
            link = open_link(host, job_id)
            through = Tunnel(host, link, listener, remote, tell=terminal.notice, give_up_s=give_up_s)
            try:
                _tell_up(host, job_id, listener.getsockname()[1], remote, as_json=as_json)
                through.serve()
            finally:
                through.close()
    except KeyboardInterrupt:
        pass
    finally:
        host.close()
    return 0


def open_link(host: Host, job_id: str | None) -> Link:
    """A connection to the host on which the job runs. Raises HostError if the job runs on another host: the hosts of a
    cluster may share a home folder, which contains the job's folder."""
    if job_id is None:
        link = host.connect()
        link.wait_ready()
        if link.loss is not None:
            raise link.loss
        return link
    link = host.connect(request={"op": "status", "job": job_id})
    try:
        status = link.first.result("status", JobView).status
        if status.on_host:
            raise HostError(f"{job_id} runs on {status.on_host}, not on {host.name}", hint="name its host with --ssh")
    except BaseException:
        link.close()
        raise
    if status.state in FINAL:
        terminal.notice(shown(f"note: {job_id} has ended: {status.state}"))
    return link


def _tell_up(host: Host, job_id: str | None, local: int, remote: int, *, as_json: bool) -> None:
    if as_json:
        up = {"id": job_id, "where": host.name, "local": local, "remote": remote}
        terminal.say(shown(json.dumps(up)))
        return
    terminal.say(shown(f"{LOOPBACK}:{local} here is {LOOPBACK}:{remote} on {host.name}"))
    terminal.notice(shown("Ctrl-C ends it"))
