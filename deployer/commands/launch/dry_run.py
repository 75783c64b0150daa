"""`run --dry-run`: shows the plan and does not run it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from deployer import terminal
from deployer.agent.host.typed import to_json
from deployer.agent.job.plan import Group, Plan, groups_of, wanted_gpus
from deployer.agent.job.views import SlotValues
from deployer.connection.host import Host
from deployer.plan.launch_plan import (
    GPUS_RULE,
    PYTHON_HERE,
    PYTHON_RULE,
    has_auto,
    render_command,
    render_cwd,
    shell_slots,
)
from deployer.plan.notify import Notify
from deployer.plan.prepare import Prepared
from deployer.printable import shown
from trainer.schema import gpu_count

MOST_NAMED = 5


def show_plan(
    prepared: Prepared,
    host: Host,
    whom: Notify,
    *,
    config: str | None,
    remote: bool,
    as_json: bool,
    defaults: Mapping[str, str],
    files: str = "",
) -> None:
    """Prints the command that would run, and its settings; with `remote` it asks the host for values that only the host
    has. `defaults`: defaults from files, each with its place. `files`: the text about files if none are sent."""
    from deployer.connection.command import agent_hash  # a launch loads it while it connects

    plan = prepared.plan
    why = PYTHON_RULE if plan.python.explicit else f"{PYTHON_RULE}. {PYTHON_HERE}"
    asked: dict[str, str] = {}
    if remote:
        with host.connect(request={"op": "slots", "plan": to_json(plan)}) as link:
            answer = link.first.result("ok", SlotValues)
        why = answer.no_python
        asked = {name: shown(value) for name, value in answer.slots.items()}
    ways = []
    for group in groups_of(plan):
        slots = {**shell_slots(group, job_id=plan.job_id, root=host.root, agent=agent_hash()), **asked}
        ways.append(_Way(slots, render_command(plan, group.role, slots), render_cwd(group.role, slots)))
    if as_json:
        terminal.say_json({**_as_json(prepared, host, ways), **({"defaults": defaults} if defaults else {})})
        return
    terminal.say(shown(f"# job      {plan.job_id} on {host.name}, {_devices(plan)}"))
    terminal.say(shown(f"# files    {files or files_line(prepared)}"))
    if config is not None and config.endswith(".py"):
        terminal.say(shown(f"# config   {config}: Python, executed here to read it"))
    for line in _lines_of(prepared, whom, defaults):
        terminal.say(shown(f"# {line}"))
    if why:
        terminal.say(shown(f"# $PYTHON  {why}"))
    wanted = wanted_gpus(plan)
    chooses = wanted is not None and has_auto(wanted.gpus) and not remote
    if chooses:
        terminal.say(shown(f"# $GPUS    {GPUS_RULE}"))
    if not remote:
        terminal.say_script(f"PYTHON={shlex.quote(plan.python.explicit or 'python3')}")
    if wanted is not None and chooses:
        terminal.say(shown(f"GPUS={','.join(map(str, range(gpu_count(wanted.gpus))))}"))
    for way in ways:
        terminal.say_script(f"{way.cwd}\n{way.command}")


def _lines_of(prepared: Prepared, whom: Notify, defaults: Mapping[str, str]) -> Iterator[str]:
    """Lines about the settings of a launch besides its command, for those that are set."""
    plan = prepared.plan
    for where in dict.fromkeys(defaults.values()):
        yield f"defaults {', '.join(name for name, place in defaults.items() if place == where)} from {where}"
    for include in plan.includes:
        yield f"include  {include.path}"
    if line := named_line(prepared):
        yield f"         {line}"
    if prepared.wheels is not None:
        yield f"wheels   {prepared.wheels[0]}: {terminal.counted(prepared.wheels[1], 'package')}"
    if plan.policy.after:
        yield f"after    {', '.join(plan.policy.after)}: starts once all of it has succeeded"
    if plan.policy.outputs:
        yield f"outputs  {', '.join(plan.policy.outputs)}: pulled with the results"
    if prepared.env_file is not None:
        yield f"env file {prepared.env_file.named}: it does not travel, its values are secrets"
    if plan.secret_names:
        yield f"secrets  {', '.join(plan.secret_names)}: to the job's environment only"
    if plan.setup is not None:
        yield f"setup    {plan.setup.command}: before the job, once for what it names"
    for place in plan.policy.notify:
        yield f"notify   a URL of {place}"
    for command in whom.commands:
        yield f"notify   {command}: on this client, while it follows"


class _Way(NamedTuple):
    """The command, folder and values with which a group would run."""

    slots: dict[str, str]
    command: str
    cwd: str


def _devices(plan: Plan) -> str:
    return "; ".join(_devices_of(group, plan) for group in groups_of(plan))


def _devices_of(group: Group, plan: Plan) -> str:
    nproc, devices = group.role.nproc, group.devices
    processes = f"{nproc} process{'es' if nproc > 1 else ''}"
    if devices.kind == "cpu":
        return f"{processes} on the CPU"
    if devices.kind == "any":
        return f"{processes}, GPUs not restricted"
    return f"{processes} on GPU {', '.join(devices.gpus)}" + (" when they are free" if plan.policy.queue else "")


def _as_json(prepared: Prepared, host: Host, ways: list[_Way]) -> dict[str, Any]:
    code = prepared.code
    return {
        "target": {"ssh": host.ssh, "root": host.root},
        **(ways[0]._asdict() if len(ways) == 1 else {"groups": [way._asdict() for way in ways]}),
        "plan": to_json(prepared.plan),
        "files": {
            "count": len(code.entries),
            "bytes": code.total_bytes,
            "ignored": code.ignored.count,
            "reasons": [[*reason, count] for reason, count in code.ignored.reasons],
        },
    }


def files_line(prepared: Prepared) -> str:
    """How many files are sent, and the rules that leave out others."""
    code = prepared.code
    line = f"{terminal.counted(len(code.entries), 'file')}, {terminal.size(code.total_bytes)}"
    ignored = code.ignored
    if ignored.count:
        patterns = ", ".join(reason.pattern for reason, _ in ignored.reasons[:3])
        more = len(ignored.reasons) - 3
        patterns += f" and {terminal.counted(more, 'more rule')}" if more > 0 else ""
        at_least = f"{ignored.count // 1000 * 1000:,}+ files"
        count = at_least if ignored.at_least else terminal.counted(ignored.count, "file")
        line += f"; left out {patterns} ({count})"
    return line


def named_line(prepared: Prepared) -> str:
    """A line about the files that are sent although git ignores them; empty if there are none."""
    if not prepared.named:
        return ""
    first = [f"{path} ({terminal.size(number)})" for path, number in prepared.named[:MOST_NAMED]]
    more = len(prepared.named) - len(first)
    rest = prepared.named[MOST_NAMED:]
    first += [f"{more} more ({terminal.size(sum(number for _, number in rest))})"] if more else []
    return f"the config names {', '.join(first)}: sent too, though the rules of git leave it out"
