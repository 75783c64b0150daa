"""`run --dry-run`: the plan, shown instead of carried out."""

from __future__ import annotations

import shlex
from typing import Any

from deployer import terminal
from deployer.connection.host import Host
from deployer.plan.launch_plan import (
    GPUS_RULE,
    PYTHON_HERE,
    PYTHON_RULE,
    has_auto,
    plan_to_json,
    render_command,
    render_cwd,
    shell_slots,
)
from deployer.plan.prepare import Prepared
from deployer.printable import shown
from trainer.schema import gpu_count


def show_plan(prepared: Prepared, host: Host, *, config: str | None, remote: bool, as_json: bool) -> None:
    """Prints the command that would run, and what it would run with; `remote` asks the host for what only it knows."""
    from deployer.connection.command import agent_hash  # a launch loads it while it connects

    plan = prepared.plan
    slots = shell_slots(plan, root=host.root, agent=agent_hash())
    why = PYTHON_RULE if plan.python.explicit else f"{PYTHON_RULE}. {PYTHON_HERE}"
    if remote:
        with host.connect(request={"op": "slots", "plan": plan_to_json(plan)}) as link:
            answer = link.first.result()
        why = answer.get("no_python", "")
        slots = {**slots, **{name: shown(value) for name, value in answer["slots"].items()}}
    command, cwd = render_command(plan, slots), render_cwd(plan, slots)
    if as_json:
        terminal.say_json(_as_json(prepared, host, slots, command=command, cwd=cwd))
        return
    terminal.say(shown(f"# job      {plan.job_id} on {host.name}, {_devices(prepared)}"))
    terminal.say(shown(f"# files    {files_line(prepared)}"))
    if config is not None and config.endswith(".py"):
        terminal.say(shown(f"# config   {config}: Python, executed here to read it"))
    for include in plan.includes:
        terminal.say(shown(f"# include  {include.path}"))
    if plan.secret_names:
        terminal.say(shown(f"# secrets  {', '.join(plan.secret_names)}: to the job's environment only"))
    if why:
        terminal.say(shown(f"# $PYTHON  {why}"))
    if has_auto(plan.gpus) and not remote:
        terminal.say(shown(f"# $GPUS    {GPUS_RULE}"))
    if not remote:
        terminal.say_script(f"PYTHON={shlex.quote(plan.python.explicit or 'python3')}")
        if has_auto(plan.gpus):
            terminal.say(shown(f"GPUS={','.join(map(str, range(gpu_count(plan.gpus))))}"))
    terminal.say_script(f"{cwd}\n{command}")


def _devices(prepared: Prepared) -> str:
    plan = prepared.plan
    processes = f"{plan.nproc} process{'es' if plan.nproc > 1 else ''}"
    if plan.device == "cpu":
        return f"{processes} on the CPU"
    if plan.device == "any":
        return f"{processes}, GPUs not restricted"
    return f"{processes} on GPU {', '.join(plan.gpus)}" + (" when they are free" if plan.policy.queue else "")


def _as_json(prepared: Prepared, host: Host, slots: dict[str, str], *, command: str, cwd: str) -> dict[str, Any]:
    code = prepared.code
    return {
        "target": {"ssh": host.ssh, "root": host.root},
        "command": command,
        "cwd": cwd,
        "slots": slots,
        "plan": plan_to_json(prepared.plan),
        "files": {
            "count": len(code.entries),
            "bytes": code.total_bytes,
            "ignored": code.ignored.count,
            "reasons": [[*reason, count] for reason, count in code.ignored.reasons],
        },
    }


def files_line(prepared: Prepared) -> str:
    """How many files travel, and by which rules others stay."""
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
