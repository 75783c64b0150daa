"""`logs`."""

from __future__ import annotations

from deployer import jobs, render
from deployer.agent.state import FINAL
from deployer.commands.screen import DETACHED, Screen, exit_code_of, log_view, next_commands, state_line
from deployer.errors import LostConnection, UsageError
from deployer.follow import follow_to_end
from deployer.host import Host
from deployer.registry import JobRecord


def logs(host: Host, job_id: str, *, follow: bool | None, tail: int | None, rank: int | None, launcher: bool) -> int:
    """Shows a log; follows it while the job runs unless `follow` says otherwise. Returns the exit code."""
    if launcher and rank is not None:
        raise UsageError("give --launcher or --rank, not both")
    found = jobs.read_status(host, job_id)
    live = follow if follow is not None else found["state"] not in FINAL
    nproc = int(found.get("nproc") or 1)
    if rank is not None and rank >= nproc:
        raise UsageError(f"{found['job_id']} has no rank {rank}, only 0 to {nproc - 1}")
    ranks = None if rank is None else [rank]
    one_rank = rank is not None or nproc == 1
    view = log_view(raw=one_rank, launcher=launcher)
    request = {"tail": tail, "ranks": ranks, "live": live}
    screen = Screen(JobRecord(found["job_id"], "", host.ssh, host.root, "", "", host.ssh_key))
    screen.folder = found["path"]
    try:
        final = follow_to_end(host.connect, found["job_id"], view=view, watcher=screen, request=request)
    except KeyboardInterrupt:
        render.notice("\nthe job runs on")
        return DETACHED
    except LostConnection as error:
        render.show_error(error)
        next_commands(found["job_id"])
        return DETACHED
    if not live:
        return 0
    render.notice(f"{found['job_id']} {state_line(final)}")
    return exit_code_of(final)
