"""`doctor`: the checks of a host and of the connection to it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from deployer import terminal
from deployer.agent.host.typed import to_json
from deployer.connection.host import Host
from deployer.printable import cells, shown

SLOW_LOGIN_S = 2.0
SLOW_DEPLOY_S = 8.0


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    hint: str = ""


class Report(NamedTuple):
    """The report that a host returns."""

    facts: dict[str, Any]
    checks: tuple[Finding, ...]


@dataclass(frozen=True)
class Contact:
    """Measurements of the connection to a host in seconds, and the output of its login."""

    connect_s: float
    answered_s: float
    round_trip_s: float
    noise: bytes


def doctor(host: Host, *, as_json: bool) -> int:
    """Shows a host's checks. Returns 0 if none fails, else 1."""
    connect_s = host.dial()
    with host.connect(request={"op": "doctor", "client_time": time.time()}) as link:
        found = link.first.result("doctor", Report)
        contact = Contact(connect_s, link.answered_s, link.round_trip_s(), link.noise)
    checks = (*check_contact(contact), *found.checks)
    if as_json:
        terminal.say_json(to_json(Report(found.facts, checks)))
    else:
        facts = {key: value for key, value in found.facts.items() if key != "gpus"}  # the checks show the GPUs
        terminal.facts(shown(host.name), [cells(key, _fact(value)) for key, value in facts.items()])
        terminal.checks([terminal.Check(c.status, *cells(c.name, c.detail, c.hint)) for c in checks])
    return 1 if any(check.status == "fail" for check in checks) else 0


def check_contact(contact: Contact) -> list[Finding]:
    """Checks of the connection and the login: output and time of the shell's start-up files, and the time to deploy an
    unchanged project."""
    login_s = max(0.0, contact.answered_s - contact.round_trip_s)
    deploy_s = contact.connect_s + contact.answered_s + contact.round_trip_s / 2
    silent = "let the shell's start-up files end early without a terminal: case $- in *i*) ;; *) return;; esac"
    said = shown(contact.noise[:80].decode("utf-8", "replace").strip())
    way = (
        f"{contact.connect_s:.2f} s to connect, {login_s:.2f} s for the login, round trip {contact.round_trip_s:.3f} s"
    )
    return [
        _check("login output", not contact.noise, f"{len(contact.noise)} bytes: {said}" if said else "none", silent),
        _check("login time", login_s < SLOW_LOGIN_S, f"{login_s:.2f} s until Python runs", silent),
        _check(
            "time to deploy",
            deploy_s < SLOW_DEPLOY_S,
            f"about {deploy_s:.1f} s to start a job of an unchanged tree ({way})",
            "a jump host, a slow DNS answer at sshd (UseDNS no) or a far machine",
        ),
    ]


def _check(name: str, good: bool, detail: str, hint: str) -> Finding:
    return Finding(name, "ok" if good else "warn", detail, "" if good else hint)


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(_fact(v) for v in value) or "-"
    return str(value)
