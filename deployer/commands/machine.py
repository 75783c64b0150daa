"""`doctor`: what concerns a host rather than a job."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from deployer import render
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
