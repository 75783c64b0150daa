"""docs/automation.md, held against the program: a script with --json alone launches, finds why a job failed, mends it,
goes on and fetches, over a real sshd; every key, error and exit code that the page names is there.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deployer
from deployer.api.values import JobFailed
from deployer.cli import cli
from deployer.error_json import error_as_json
from deployer.errors import FerryError, HostError, LostConnection, UnknownJob, UsageError
from deployer.exit_codes import as_markdown
from tests.support.ferry import REPO, Ferry
from tests.support.sshd import SshServer

PAGE = (REPO / "docs" / "automation.md").read_text()
TRAIN = """\
import json, os
from pathlib import Path
rows = Path("data/rows.txt").read_text().split()
rate = float(os.environ["LR"])
run = Path(os.environ["TORCHFERRY_RUN_DIR"])
(run / "metrics.jsonl").write_text(json.dumps({"step": len(rows), "loss": rate}) + "\\n")
Path("weights").write_text("w")
print("trained")
"""


def blocks(kind: str) -> Iterator[str]:
    """The fenced blocks of the page that begin with this word or these words."""
    return (match[1] for match in re.finditer(rf"^```{kind}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))


def shape(name: str) -> Any:
    (text,) = blocks(f"json {name}")
    return json.loads(text)


def keys_of(value: Any) -> set[str]:
    return set((value[0] if isinstance(value, list) else value).keys())


@pytest.fixture
def script(remote: Ferry) -> SimpleNamespace:
    """The page's own functions, with this client as their program, and how often they called it."""
    calls: list[tuple[str, ...]] = []

    def run(argv: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
        assert argv[0] == "torchferry" and how["stdin"] == subprocess.DEVNULL
        calls.append(tuple(argv[1:]))
        return subprocess.run(
            remote.argv(*argv[1:]), cwd=remote.project, env=remote.environment(), stderr=subprocess.PIPE, **how
        )

    given: dict[str, Any] = {}
    for text in (block for block in blocks("python") if "def " in block):
        exec(text, given)
    pipes = {"DEVNULL": subprocess.DEVNULL, "PIPE": subprocess.PIPE}
    given["subprocess"] = SimpleNamespace(run=run, **pipes)
    remote.write("my_train.py", TRAIN)
    remote.write(".gitignore", "data/\n")
    (remote.project / "data").mkdir()
    remote.write("data/rows.txt", "one two three")
    subprocess.run(["git", "init", "-q", "."], cwd=remote.project, check=True)
    return SimpleNamespace(calls=calls, ferry=given["ferry"], until=given["run_until_it_succeeds"])


def test_script_launches_finds_why_it_failed_mends_resumes_and_fetches(remote: Ferry, script: SimpleNamespace) -> None:
    """First a file is missing, which a new launch brings; then a value is wrong, which a resume mends."""
    where, program = ("--python", sys.executable, *remote.where()), ("--env", "LR=fast", "--", "python", "my_train.py")
    code, report = script.ferry("run", *where, *program)
    assert (code, report["state"], report["exit_code"], report["code"]) == (1, "failed", 1, 1)
    assert keys_of(report) == keys_of(shape("run")) and report["where"] == remote.ssh

    _, status = script.ferry("status", report["id"])
    assert keys_of(shape("status")) <= keys_of(status)
    assert status["missing"] == [{"name": "data/rows.txt", "kind": "file"}] == report["missing"]
    (why,) = status["missed"]
    option, path = re.findall(r"(--include) (\S+)$", why)[0]

    _, second = script.ferry("run", "--detach", option, path, *where, *program)
    assert keys_of(second) == keys_of(report) and second["state"] == "preparing" and second["code"] is None
    _, pulled = script.ferry("pull", second["id"], "--watch", "--every", "0.2s")
    assert keys_of(shape("pull")) <= keys_of(pulled)
    _, status = script.ferry("status", second["id"])
    assert (status["state"], status["last_lines"][-1]) == (
        "failed",
        "ValueError: could not convert string to float: 'fast'",
    )

    code, report = script.ferry("resume", second["id"], "--env", "LR=0.5", "--out", "weights")
    assert (code, report["state"], report["attempt"], report["not_home"]) == (0, "succeeded", 2, [])
    results = Path(report["results"])
    assert json.loads((results / "metrics.jsonl").read_text()) == {"step": 3, "loss": 0.5}
    assert (results / "code" / "weights").read_text() == "w"
    assert len(script.calls) == 6 <= 12
    assert ["pull", report["id"]] in report["next"]


def test_loop_of_the_page_mends_until_it_succeeds(remote: Ferry, script: SimpleNamespace) -> None:
    told: list[str] = []

    def mend(said: dict[str, Any]) -> tuple[str, ...]:
        told.append(said["last_lines"][-1])
        return ("resume", said["id"], "--env", "LR=0.5")

    words = ("--python", sys.executable, "--include", "data", *remote.where(), "--env", "LR=x", "--")
    said = script.until(mend, "run", *words, "python", "my_train.py")
    assert (said["state"], said["attempt"], len(told)) == ("succeeded", 2, 1)
    with pytest.raises(RuntimeError, match="no_such"):
        script.until(lambda report: None, "run", "--no_such")


def test_every_other_answer_has_the_keys_of_the_page(remote: Ferry, script: SimpleNamespace) -> None:
    _, job = script.ferry("run", "--detach", *remote.where(), "--", "sh", "-c", "echo up; exec sleep 1000")
    assert keys_of(shape("ps")) <= keys_of(script.ferry("ps")[1])
    code, said = script.ferry("exec", job["id"], "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (code, said) == (3, {"code": 3, "stdout": "out\n", "stderr": "err\n", "cut": False})
    assert keys_of(said) == keys_of(shape("exec"))
    code, stopped = script.ferry("stop", job["id"], "--grace", "0")
    assert code == 0 and keys_of(shape("stop")) <= keys_of(stopped) and stopped[0]["state"] == "stopped"
    done = remote.run("logs", job["id"], "--json")
    line, end = map(json.loads, done.stdout.splitlines())
    assert (line["text"], line["rank"], end["end"]["state"]) == ("up", 0, "stopped")
    assert keys_of(line) == keys_of(shape("logs")) and keys_of(end["end"]) == keys_of(shape("end")["end"])


# --- errors -----------------------------------------------------------------------------------------------------------


def test_error_is_json_with_its_place_and_the_next_command(remote: Ferry, script: SimpleNamespace) -> None:
    remote.write("lora.yaml", "train:\n  steps: abc\n")
    code, said = script.ferry("run", "lora.yaml")
    assert (code, said) == (2, shape("error"))
    code, said = script.ferry("status", "nope")
    assert (code, said["error"]["code"], said["error"]["next"]) == (2, "unknown_job", ["ps", "--all", "--json"])
    assert script.ferry(*said["error"]["next"][:1], *said["error"]["next"][1:2]) == (0, [])
    code, said = script.ferry("stop", "nope")
    assert (code, said["error"]["code"]) == (2, "unknown_job")
    code, said = script.ferry("ps", "--nonsense")
    assert (code, said["error"]["code"]) == (2, "usage")


def test_nobody_is_asked_where_a_script_reads(remote: Ferry, script: SimpleNamespace, server: SshServer) -> None:
    known = server.known_hosts_path.read_text()
    server.known_hosts_path.write_text("")
    try:
        for transport in ("fabric", "openssh"):
            code, said = script.ferry("run", "--ssh", "box", "--transport", transport, "--", "true")
            assert (code, said["error"]["code"]) == (125, "host_key"), said
            assert "--accept-new-host-key" in said["error"]["hint"]
    finally:
        server.known_hosts_path.write_text(known)
    _, job = script.ferry("run", "--detach", *remote.where(), "--", "sleep", "1000")
    for words in (("stop", "--all"), ("gc",), ("forget", job["id"])):
        code, said = script.ferry(*words, *(remote.where() if words[0] != "forget" else ()))
        assert (code, said["error"]["code"]) == (2, "usage") and "--yes" in said["error"]["hint"], words
    assert script.ferry("stop", "--all", "--yes", "--grace", "0", *remote.where())[0] == 0


@pytest.mark.parametrize(
    ("error", "next_words"),
    [
        (UnknownJob("x"), ["ps", "--all", "--json"]),
        (
            HostError("x", hint="what has come is kept; go on with: torchferry pull a-1 --checkpoints"),
            ["pull", "a-1", "--checkpoints"],
        ),
        (
            UsageError("x", hint="did you mean: deploy.py run --env 'A=b c' -- true"),
            ["run", "--env", "A=b c", "--", "true"],
        ),
        (UsageError("x", hint="did you mean train.py?"), None),
        (UsageError("x", hint="did you mean: deploy.py run -- PROGRAM …"), None),
    ],
)
def test_hint_that_is_a_command_is_given_as_words(error: FerryError, next_words: list[str] | None) -> None:
    assert error_as_json(error)["next"] == next_words


def test_error_amid_a_launch_names_the_job_that_may_run() -> None:
    error = LostConnection("gone")
    error.of_job("a-1")
    told = error_as_json(error)
    assert (told["id"], told["next"], told["exit_code"]) == ("a-1", ["status", "a-1", "--json"], 75)


def kinds(top: type[FerryError]) -> Iterator[type[FerryError]]:
    yield top
    for kind in top.__subclasses__():
        yield from kinds(kind)


def test_page_lists_every_code_of_an_error() -> None:
    for module in pkgutil.walk_packages(deployer.__path__, "deployer."):
        if "agent" not in module.name:
            importlib.import_module(module.name)
    rows = re.findall(r"^\| `(\w+)` \| ([\w' ]+) \| (\w+) \|", PAGE, re.MULTILINE)
    there = {kind.code: kind for kind in kinds(FerryError) if kind.__module__.startswith("deployer.")}
    assert {code for code, _, _ in rows} == set(there)
    for code, exit_code, name in rows:
        named = next(kind for kind in kinds(FerryError) if kind.__name__ == name)
        assert named.code == code
        assert exit_code == ("the job's" if named is JobFailed else str(named.exit_code))
    assert as_markdown() in PAGE


def test_every_command_that_a_script_needs_takes_json() -> None:
    knows: Callable[[str], bool] = lambda name: any("--json" in param.opts for param in cli.commands[name].params)  # noqa: E731
    names = ("run", "resume", "stop", "status", "pull", "logs", "exec", "doctor", "gpus", "gc", "ps", "forget")
    assert [name for name in names if not knows(name)] == []
