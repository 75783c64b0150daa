"""How long `ps` over 20 hosts takes, as a ratio to the slowest of them alone.

    .venv/bin/python bench/ps.py [--hosts 20] [--rounds 3] [--step-ms 100]

Each host is an SSH server on a separate port; host N begins to answer N times 100 ms late, as if it were far away or
busy. All of them share this machine's cores, which real hosts do not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from lab import ALIAS, DEPLOY, Lab, SshServer, interleave, parser_of, report, require, start_sshd, timed

LIMIT = 1.5


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--hosts", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=int, default=100)
    chosen = parser.parse_args()
    require("ssh")
    with Lab.open() as lab, ExitStack() as stack:
        names = [f"host{number:02d}" for number in range(1, chosen.hosts + 1)]
        servers = [
            stack.enter_context(start_slow_host(lab.folder, name, number * chosen.step_ms / 1000))
            for number, name in enumerate(names, 1)
        ]
        config, state = client_config(lab.folder, names, servers), lab.folder / "state"
        env = {**lab.env, "TORCHFERRY_SSH_CONFIG": str(config), "TORCHFERRY_STATE_DIR": str(state)}
        write_records(state / "jobs", names)
        ps = [sys.executable, DEPLOY, "ps", "--all", "--json"]
        check_all_answer(ps, env, lab.folder, names)
        ways = {
            "all": lambda: timed(ps, env=env, cwd=lab.folder),
            "slowest": lambda: timed([*ps, "--ssh", names[-1]], env=env, cwd=lab.folder),
        }
        medians = interleave(ways, chosen.rounds)
    report(f"ps, {chosen.hosts} hosts", medians["all"], medians["slowest"], by="the slowest host alone", limit=LIMIT)
    return 0


def start_slow_host(folder: Path, name: str, late_s: float) -> SshServer:
    command = f'sleep {late_s}; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
    return start_sshd(folder, name=name, extra_config=f"ForceCommand {command}")


def client_config(folder: Path, names: list[str], servers: list[SshServer]) -> Path:
    """One ssh_config file with an alias for each host."""
    path = folder / "ssh_config"
    parts = zip(names, servers, strict=True)
    path.write_text(
        "".join(s.client_config_path.read_text().replace(f"Host {ALIAS} {s.host}", f"Host {n}") for n, s in parts)
    )
    return path


def write_records(folder: Path, names: list[str]) -> None:
    """Records a job on every host, as if it had been launched from here."""
    folder.mkdir(parents=True)
    for name in names:
        record = {"job_id": f"job-{name}", "name": "job", "ssh": name, "root": "~/.torchferry", "results": ""}
        (folder / f"job-{name}.json").write_text(json.dumps({**record, "created": "2026-01-01T00:00:00Z"}))


def check_all_answer(ps: list[str], env: dict[str, str], folder: Path, names: list[str]) -> None:
    """Also brings the agent to every host. Raises RuntimeError if one does not answer: it would make `ps` look fast."""
    done = subprocess.run(ps, env=env, cwd=folder, capture_output=True, text=True)
    without_agent = [name for name in names if not (folder / name / "home" / ".torchferry" / "agent").exists()]
    if done.returncode or without_agent or "unreachable" in done.stdout:
        raise RuntimeError(f"not every host answered: {without_agent} {done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
