"""Completion: real shells, with the script that the command prints, complete what somebody has begun to type."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployer.cli import cli
from deployer.jobs.registry import JobRecord, write_record
from tests.deployer.commands.shells import shell
from tests.support.ferry import REPO, Ferry
from trainer.config.keys import known_keys

SHELLS = [
    pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"no {name}"))
    for name in ("bash", "zsh", "fish")
]
SSH_CONFIG = """\
Host gpu-box big
  HostName 10.0.0.1
host = "quoted" # !not *.neither
Host *.lab ? !gpu-box
Include more/*.conf
Match all
Include loop
Host "open
"""


@pytest.fixture
def place(ferry: Ferry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ferry:
    """A client that has launched three jobs, with configs and an ssh_config."""
    home = tmp_path / "home"
    (home / ".ssh" / "more").mkdir(parents=True)
    (home / ".ssh" / "config").write_text(SSH_CONFIG)
    (home / ".ssh" / "loop").write_text("Include config\nHost later\n")
    (home / ".ssh" / "more" / "a.conf").write_text("Host included\n")
    ferry.env["HOME"] = str(home)
    for number, (job_id, ssh) in enumerate((("sft-1", "root@box:22"), ("sft-2", None), ("lora-3", "gpu-box"))):
        record = JobRecord(job_id, "n", ssh, "/r", "/results", f"2026-01-3{number}T14:30:00Z")
        write_record(record)
        os.utime(ferry.state / "jobs" / f"{job_id}.json", (number, number))
    (ferry.project / "configs").mkdir()
    (ferry.project / "results").mkdir()
    for name in ("my.yaml", "a b.py", "notes.txt", "configs/one.py", "-x.py"):
        ferry.write(name, "")
    return ferry


Offers = Callable[[str], list[str]]


@pytest.fixture(params=SHELLS)
def offers(request: pytest.FixtureRequest, place: Ferry, tmp_path: Path) -> Iterator[Offers]:
    """What a shell offers at the end of a line: whole words, as it takes them."""
    done = place.run("completion", request.param)
    assert (done.returncode, done.stderr) == (0, b"")
    if request.param == "fish":
        yield lambda line: [word.partition("\t")[0] for word in fish_offers(place, done.stdout, line)]
    else:
        with opened(request.param, place, tmp_path) as running:
            yield running.offers


def opened(name: str, place: Ferry, folder: Path) -> Any:
    script = place.run("completion", name).stdout.decode()
    (folder / name).mkdir()
    return shell(name, script, folder / name, place.environment(), place.project)


def fish_offers(place: Ferry, script: bytes, line: str) -> list[str]:
    code = f"{script.decode()}\ncomplete -C (cat | string collect)"
    argv = ["fish", "--no-config", "-c", code]
    done = subprocess.run(argv, input=line.encode(), cwd=place.project, env=place.environment(), capture_output=True)
    assert done.stderr == b""
    return done.stdout.decode().splitlines()


def test_shell_completes_each_kind_of_word(offers: Offers) -> None:
    assert offers("torchferry st") == ["status", "stop"]
    assert offers("torchferry run --max-r") == ["--max-restarts", "--max-runtime"]
    assert offers("torchferry logs ") == ["lora-3", "sft-2", "sft-1"], "the newest first"
    assert offers("torchferry stop sft-2 s") == ["sft-1"]
    assert offers("torchferry run --transport f") == ["fabric"]
    assert offers("torchferry run --transport=f") == ["--transport=fabric"]
    hosts = offers("torchferry ps --ssh ")
    assert sorted(hosts) == sorted(["gpu-box", "root@box:22", "big", "quoted", "included", "later"])
    assert offers("torchferry ps --ssh me@bi") == ["me@big"]
    assert sorted(offers("torchferry my")) == ["my.yaml"]
    assert offers("torchferry plot sft-2 s") == ["sft-1"]
    assert offers("torchferry plot no") == ["notes.txt"]
    assert offers("torchferry res") == ["resume"], "a folder of results is not in the way"
    assert offers("torchferry comp") == ["completion"] and offers("torchferry conf") == ["configs/"]
    assert offers("torchferry run configs/") == ["configs/one.py"]
    assert offers("torchferry my.yaml optim.le") == ["optim.learning_rate="]
    assert {"optim.", "recipe="} <= set(offers("torchferry my.yaml "))
    assert offers("torchferry resume sft-1 optim.l")[:1] == ["optim.learning_rate="]
    assert sorted(offers("torchferry my.yaml target.env")) == ["target.env.", "target.env_file="]
    assert offers("torchferry my.yaml train.float8=")
    assert offers("torchferry run --ssh-key no") == ["notes.txt"]
    assert offers("torchferry run -- python no") == ["notes.txt"]
    assert offers("torchferry doctor --ssh nowhere --x") == []


def test_program_in_a_checkout_is_completed_and_somebody_elses_is_not_run(offers: Offers, place: Ferry) -> None:
    assert offers(f"{REPO / 'deploy.py'} statu") == ["status"]
    place.write("deploy.py", "#!/bin/sh\ntouch ran\necho plain,--status\n")
    (place.project / "deploy.py").chmod(0o755)
    assert offers("./deploy.py no") == ["notes.txt"]
    assert not (place.project / "ran").exists()


@pytest.mark.parametrize("name", SHELLS[:2])
def test_line_goes_on_after_a_key_and_not_after_a_word(name: str, place: Ferry, tmp_path: Path) -> None:
    with opened(name, place, tmp_path) as running:
        assert running.becomes("torchferry statu") == "torchferry status "
        assert running.becomes("torchferry my.yaml optim.learn") == "torchferry my.yaml optim.learning_rate="
        assert running.becomes("torchferry my.yaml opt") == "torchferry my.yaml optim."
        assert running.becomes("torchferry my.yaml optim.schedule=cos") == "torchferry my.yaml optim.schedule=cosine "
        assert running.becomes("torchferry my.yaml data.train=no") == "torchferry my.yaml data.train=notes.txt "
        assert running.becomes("torchferry ps --ssh root@bo") == "torchferry ps --ssh root@box:22 "
        assert running.becomes("torchferry a") == "torchferry a\\ b.py "
        assert running.becomes("torchferry conf") == "torchferry configs/"
        assert running.becomes("true && torchferry pul") == "true && torchferry pull "


@pytest.mark.parametrize("name", SHELLS[:2])
def test_name_of_a_file_is_completed_as_a_word_that_runs_nothing(name: str, place: Ferry, tmp_path: Path) -> None:
    place.write("$(touch ran).py", "")
    with opened(name, place, tmp_path) as running:
        assert running.becomes("torchferry \\$").rstrip() == r"torchferry \$\(touch\ ran\).py"
        in_quotes = running.becomes("torchferry '$").rstrip()
        assert in_quotes == ("torchferry '$" if name == "bash" else "torchferry '$(touch ran).py'")
    assert not (place.project / "ran").exists()


@pytest.mark.parametrize("name", SHELLS[1:])
def test_shell_that_shows_help_says_where_and_when_a_job_was_launched(name: str, place: Ferry, tmp_path: Path) -> None:
    if name == "fish":
        script = place.run("completion", name).stdout
        assert fish_offers(place, script, "torchferry logs l") == ["lora-3\tgpu-box, 2026-01-32 14:30"]
        assert fish_offers(place, script, "torchferry sto") == ["stop\tStop jobs after giving them time to save."]
    else:
        with opened(name, place, tmp_path) as running:
            running.becomes("torchferry logs sft-")
            assert b"root@box:22, 2026-01-30 14:30" in running.screen
            assert b"this machine, 2026-01-31 14:30" in running.screen


# --- what a shell asks ------------------------------------------------------------------------------------------------


def ask(place: Ferry, line: str, *flags: str, shell: str = "fish") -> subprocess.CompletedProcess[bytes]:
    words = [sys.executable, *flags, str(REPO / "deploy.py")]
    asked = {"_TORCHFERRY_COMPLETE": f"{shell}_complete", "_TORCHFERRY_LINE": line}
    return subprocess.run(words, cwd=place.project, env={**place.environment(), **asked}, capture_output=True)


def test_every_key_of_the_schema_is_offered(place: Ferry) -> None:
    sections = {key.partition(".")[0] for key in known_keys() if "." in key}
    offered = [
        word.removeprefix("open,")
        for line in ("", *(f"{section}." for section in sections))
        for word in ask(place, f"torchferry my.yaml {line}").stdout.decode().split("\n")[:-1]
    ]
    keys = [word.rstrip("=").removesuffix(".") for word in offered if word[:-1] not in sections]
    assert sorted(keys) == sorted(known_keys())


def test_every_command_and_option_is_offered(place: Ferry) -> None:
    lines = ask(place, "torchferry ").stdout.decode().splitlines()
    offered = {line.removeprefix("plain,").partition("\t")[0] for line in lines}
    assert offered == {*cli.commands, "my.yaml", "a b.py", "-x.py"}
    for name, command in cli.commands.items():
        options = {opt for param in command.params for opt in param.opts if opt.startswith("--")}
        answer = ask(place, f"torchferry {name} --").stdout.decode()
        assert {line[6:].partition("\t")[0] for line in answer.splitlines()} >= options


NASTY = [
    *(
        "",
        " ",
        "torchferry",
        "torchferry '",
        'torchferry "a b',
        "torchferry \\",
        "torchferry logs \x1b[2J",
        "torchferry $(id) ",
    ),
    *(
        "torchferry kill x ",
        "torchferry stop ../ ",
        "torchferry --no-such ",
        "torchferry run --gpus x ",
        "torchferry doctor a b ",
    ),
    *(
        "torchferry \udcff",
        "torchferry ~no-such/",
        "torchferry /proc/self/fd/",
        "torchferry my.yaml =",
        "torchferry run --ssh=",
    ),
    *("torchferry exec sft-1 ls ", "torchferry run --env A ", "torchferry run --max-restarts -1 ", "torchferry ps -w "),
]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "nonsense"])
def test_answer_is_never_an_error_whatever_was_typed(place: Ferry, shell: str) -> None:
    for line in NASTY:
        done = ask(place, line, shell=shell)
        assert done.stderr == b"" and done.returncode in (0, 1), (line, done)
        assert all(
            word.split(b",")[0] in (b"plain", b"open", b"file", b"dir", b"") for word in done.stdout.split(b"\n")
        )


def test_damaged_notes_and_files_offer_what_is_left(place: Ferry) -> None:
    jobs = place.state / "jobs"
    (jobs / "cut.json").write_bytes(b'{"job_id": "cut"')
    (jobs / "bytes.json").write_bytes(bytes(range(256)))
    (jobs / "list.json").write_text("[" * 100_000)
    (jobs / "other.json").write_text((jobs / "sft-1.json").read_text())
    (jobs / "folder.json").mkdir()
    os.mkfifo(jobs / "pipe.json")
    (jobs / "nowhere.json").symlink_to("gone")
    config = Path(place.env["HOME"], ".ssh", "config")
    (place.project / "evil\n.py").touch()
    done = ask(place, "torchferry logs ")
    assert (done.stdout.count(b"plain,"), done.stderr) == (3, b"")
    assert ask(place, "torchferry ").stdout.count(b".py\n") == 2
    for spoil in (
        lambda: config.write_bytes(b"Host \xff\xfe\nHost a\0b c\n\0"),
        config.unlink,
        lambda: os.mkfifo(config),
    ):
        spoil()
        done = ask(place, "torchferry ps --ssh ")
        assert b"plain,gpu-box\n" in done.stdout and done.stderr == b""
    place.state.chmod(0o777)
    done = ask(place, "torchferry logs ")
    assert (done.stdout.strip(), done.stderr) == (b"", b"")
    assert ask(place, "torchferry statu").stdout.startswith(b"plain,status")


def test_answer_loads_the_schema_for_keys_alone_and_nothing_that_connects(place: Ferry) -> None:
    loaded = {line: modules(place, line) for line in ("torchferry st", "torchferry logs ", "torchferry c.py optim.")}
    heavy = ("torch", "paramiko", "fabric", "rich", "yaml", "deployer.plan", "deployer.launch", "trainer.config")
    for line, names in loaded.items():
        assert {name for name in names if any(f"{name}.".startswith(f"{root}.") for root in heavy)} == set(), line
        assert ("trainer.schema" in names) == ("optim" in line)


def modules(place: Ferry, line: str) -> set[str]:
    said = ask(place, line, "-X", "importtime").stderr.decode()
    return {row.rpartition("|")[2].strip() for row in said.splitlines()}


def test_answer_takes_no_more_time_than_a_few_imports_of_click(place: Ferry) -> None:
    for number in range(1000):
        record = JobRecord(f"many-{number}", "n", "box", "/r", "/results", "2026-01-30T14:30:00Z")
        write_record(record)
    click_s = cpu_s(lambda: subprocess.run([sys.executable, "-c", "import click"]))
    for line in ("torchferry st", "torchferry logs ", "torchferry ps --ssh ", "torchferry c.py optim."):
        assert cpu_s(lambda line=line: ask(place, line)) < 5 * click_s, line


def cpu_s(run: Callable[[], Any]) -> float:
    """The least of the processor's time that it took."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(5))


def test_script_is_a_program_for_its_shell_wherever_the_client_lies(tmp_path: Path, place: Ferry) -> None:
    odd = tmp_path / 'it\'s a \\ $HOME "place"'
    shutil.copytree(REPO / "deployer", odd / "deployer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPO / "trainer" / "schema", odd / "trainer" / "schema")
    shutil.copy(REPO / "trainer" / "__init__.py", odd / "trainer")
    shutil.copy(REPO / "deploy.py", odd)
    elsewhere = Ferry(place.project, place.state, place.root, source=odd)
    for name in ("bash", "zsh", "fish"):
        if not shutil.which(name):
            continue
        done = elsewhere.run("completion", name)
        if name == "fish":
            assert fish_offers(elsewhere, done.stdout, "torchferry statu")[0].startswith("status\t")
        else:
            with opened(name, elsewhere, tmp_path) as running:
                assert running.becomes("torchferry statu") == "torchferry status "


def test_help_says_how_to_install_it_in_a_line_for_each_shell(place: Ferry) -> None:
    said = place.run("completion", "--help").stdout.decode()
    lines = [line.strip() for line in said.splitlines() if f"{REPO / 'deploy.py'} completion" in line]
    assert [line.split()[-3] for line in lines][-3:] == ["bash", "zsh", "fish"]
    home = place.env["HOME"]
    Path(home, ".config", "fish", "conf.d").mkdir(parents=True)
    for line in lines[-3:]:
        subprocess.run(["sh", "-c", line], env=place.environment(), cwd=place.project, check=True)
    assert Path(home, ".bashrc").stat().st_size and Path(home, ".zshrc").stat().st_size


def test_other_shell_is_refused(place: Ferry) -> None:
    assert place.run("completion", "tcsh").returncode == 2
