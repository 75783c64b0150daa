"""`doctor` and `gc`: what concerns a host rather than a job."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from deployer import render
from deployer.errors import UsageError
from deployer.host import Host


def doctor(host: Host, *, as_json: bool) -> int:
    """Shows a host's checks; 0 when none fails, 1 otherwise."""
    begun = time.monotonic()
    with host.connect(request={"op": "doctor", "client_time": time.time()}) as link:
        found = link.first.result("doctor")
    took_s = time.monotonic() - begun
    found["checks"].append(
        {"name": "connection", "status": "ok", "detail": f"{took_s:.2f} s for all of this, one connection", "hint": ""}
    )
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        render.table((host.name, ""), [(key, _fact(value)) for key, value in found["facts"].items()])
        render.checks(found["checks"])
    return 1 if any(check["status"] == "fail" for check in found["checks"]) else 0


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(_fact(v) for v in value) or "-"
    return str(value)


# --- gc ---------------------------------------------------------------------------------------------------------------

_KINDS = {
    "tree": "file lists of trees",
    "blob": "files in the store",
    "data": "data sets and wheels",
    "env": "Python environments",
    "agent": "agents of other versions",
    "spare": "spare copy of a tree",
    "tmp": "leftovers",
}


def gc(host: Host, *, limits: dict[str, float | int | None], dry_run: bool, yes: bool, as_json: bool) -> None:
    """Shows what no job needs any more (and the ended jobs that the limits give up), asks, removes it."""
    if not (dry_run or yes) and (as_json or not sys.stdin.isatty()):
        raise UsageError("gc asks before it removes, and nobody can answer here", hint="--dry-run shows; --yes removes")
    with host.connect(request={"op": "gc", "dry_run": not yes or dry_run, **limits}) as link:
        found = link.first.result("gc")
        if not (dry_run or yes) and found["total_bytes"]:
            _show_gc(host, found, done=False)
            if not click.confirm(f"Remove {render.size(found['total_bytes'])}?", err=True):
                raise click.Abort
            only = [job["id"] for job in found["jobs"]]
            found, yes = link.call("gc", only=only, **limits).result("gc"), True
    if as_json:
        click.echo(json.dumps({**found, "removed": yes and not dry_run}, indent=1))
    else:
        _show_gc(host, found, done=yes and not dry_run)


def _show_gc(host: Host, found: dict[str, Any], *, done: bool) -> None:
    rows = [(f"job {job['id']}", "", render.size(job["size_bytes"]), _age(job["ended_s"])) for job in found["jobs"]]
    for row in found["rest"]:
        what = _KINDS.get(row["kind"], row["kind"])
        rows.append((what, str(row["count"]), render.size(row["size_bytes"]), _age(row["oldest_s"])))
    if rows:
        render.table(("REMOVED" if done else "TO REMOVE", "COUNT", "SIZE", "OLDEST"), rows)
    for row in found["kept_jobs"]:
        render.notice(f"kept: {row['count']} jobs, {row['what']}, {render.size(row['size_bytes'])}")
    for path in found["remaining"]:
        render.notice(f"could not be removed: {path}")
    size = render.size(found["total_bytes"])
    free = f"{render.size(found['free_bytes'])} are free on {host.name} below {found['root']}"
    render.notice(f"{'removed' if done else 'to remove'}: {size if rows else 'nothing'}; {free}")


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else render.age(seconds)
