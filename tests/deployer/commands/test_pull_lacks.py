"""A pull that cannot bring everything brings the rest, and its code and last line say what is not home."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.job.status import FAILED, SUCCEEDED, Status
from deployer.commands.launch.run import follow_through
from deployer.connection.host import Host
from deployer.errors import UsageError
from deployer.jobs.registry import JobRecord
from deployer.pull.choice import BEYOND_LIMIT, PullRequest
from deployer.pull.rounds import Pulled, pull
from tests.support.accounts import ROOT_ONLY
from tests.support.lying import lying_host

KB = 1000


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job's folder on this machine as host."""
    folder = tmp_path / "root" / "jobs" / "j1"
    put(folder / "metrics.jsonl", 10)
    put(folder / "logs" / "attempt_1" / "rank_0.log", 100)
    put(folder / "export" / "model.safetensors", 300 * KB)
    return folder


def put(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def host_of(job: Path) -> Host:
    return Host(None, str(job.parent.parent))


def lacking(pulled: Pulled) -> dict[str, str]:
    return {left.name: left.reason for left in pulled.not_home}


# --- this machine's disk ----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Any]:
    """Makes `home` a disk of its own, with these options."""
    home = tmp_path / "home"
    home.mkdir()

    def make(options: str) -> Path:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", home], check=True)
        return home

    yield make
    subprocess.run(["umount", "-l", home], check=False, capture_output=True)


@ROOT_ONLY
def test_export_that_does_not_fit_stays_and_metrics_and_logs_come(job, small_disk):
    put(job / "export" / "model.safetensors", 8000 * KB)
    home = small_disk("size=20m")  # of which 16 are kept free
    pulled = pull(host_of(job), "j1", target=home)
    (words,) = lacking(pulled).values()
    assert list(lacking(pulled)) == ["export/model.safetensors"]
    assert re.fullmatch(r"no room here: 8\.0 MB are due, [\d.]+ [kM]B are free", words)
    assert (home / "metrics.jsonl").exists() and (home / "logs" / "attempt_1" / "rank_0.log").exists()


@ROOT_ONLY
def test_host_that_says_its_files_take_nothing_does_not_fill_the_disk(small_disk, tmp_path):
    home = small_disk("size=24m")
    code = f"files(['metrics.jsonl', 5, 1, 1, 0], ['export/huge', {1 << 40}, 1, 2, 0])\n"
    code += "while True:\n    call = hear('fetch')\n    for piece in call['pieces']:\n"
    code += "        data = b'x' * piece['length']\n"
    code += "        for at in range(0, len(data), 48000):\n"
    code += "            frame({'id': call['id'], 'data': True}, data[at : at + 48000])\n"
    code += "        digest = hashlib.blake2b(data, digest_size=16).hexdigest()\n"
    code += "        event('piece', {'digest': digest}, call['id'])\n"
    code += "    frame({'id': call['id'], 'ok': {}})"
    pulled = pull(lying_host(code, tmp_path), "j1", target=home)
    assert lacking(pulled) == {"export/huge": "this disk has no room left"}
    assert (home / "metrics.jsonl").read_bytes() == b"xxxxx" and pulled.fetched_bytes < 64 << 20


@ROOT_ONLY
def test_disk_without_inodes_takes_what_it_can(job, small_disk):
    for number in range(40):
        put(job / "export" / str(number), 1000 + number)
    home = small_disk("size=40m,nr_inodes=20")
    pulled = pull(host_of(job), "j1", target=home)
    assert set(lacking(pulled).values()) == {"this disk has no inodes left"}
    assert (home / "metrics.jsonl").exists() and not (home / "export" / "39").exists()


@ROOT_ONLY
def test_folder_here_that_takes_no_file_keeps_no_other_away(job, tmp_path):
    folder = tmp_path / "home" / "export"
    folder.mkdir(parents=True)
    subprocess.run(["chattr", "+i", folder], check=True)  # as a folder's mode is for whoever is not root
    try:
        pulled = pull(host_of(job), "j1", target=tmp_path / "home")
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)
    assert lacking(pulled) == {"export/model.safetensors": "here: Operation not permitted"}
    assert (tmp_path / "home" / "metrics.jsonl").exists()


def test_name_that_no_file_system_holds_is_one_file(tmp_path):
    code = f"files(['logs/{'x' * 300}', 0, 1, 1, 0], ['logs/ok', 0, 1, 2, 0]); call = hear('fetch')\n"
    code += "for piece in call['pieces']: "
    code += "event('piece', {'digest': hashlib.blake2b(digest_size=16).hexdigest()}, call['id'])\n"
    code += "frame({'id': call['id'], 'ok': {}}); forever()"
    pulled = pull(lying_host(code, tmp_path), "j1", target=tmp_path / "home")
    assert [reason[:38] for reason in lacking(pulled).values()] == ["this file system does not take the name"[:38]]
    assert (tmp_path / "home" / "logs" / "ok").exists()


# --- what is asked for by its path ------------------------------------------------------------------------------------


def test_paths_are_looked_for_in_the_jobs_folder_and_its_code(job, tmp_path):
    put(job / "out" / "a", 1)
    put(job / "code" / "out" / "b", 2)
    put(job / "code" / "shipped.py", 3)
    request = PullRequest(paths=("out", "export/model.safetensors", "nothing"))
    pulled = pull(host_of(job), "j1", target=tmp_path / "home", request=request)
    came = {str(path.relative_to(tmp_path / "home")) for path in (tmp_path / "home").rglob("*") if path.is_file()}
    assert came == {"out/a", "code/out/b", "export/model.safetensors"}
    assert lacking(pulled) == {"nothing": "the job has no such file"}


@pytest.mark.parametrize("path", ["../j2", "a/../../j2", "/etc/passwd", "", ".", "code//x"])
def test_path_that_leaves_the_jobs_folder_is_refused_by_the_host_too(job, tmp_path, path):
    put(job.parent / "j2" / "secret", 1)
    with pytest.raises(Exception, match="not a path below the job's folder"):
        pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(paths=(path,)))


@pytest.mark.parametrize("path", ["../j2/secret", "a\0b", "\ud800"])
def test_piece_of_a_path_that_no_file_of_the_job_has_is_refused(job, path):
    piece = {"path": path, "inode": "1", "offset": 0, "length": 1}
    with host_of(job).connect(request={"op": "fetch", "job": "j1", "pieces": [piece]}) as link:
        with pytest.raises(UsageError, match="not a path below the job's folder"):
            link.first.result()


def test_link_out_of_the_jobs_folder_is_not_followed_and_is_not_home(job, tmp_path):
    put(tmp_path / "elsewhere" / "secret", 1)
    (job / "code").mkdir()
    (job / "code" / "data").symlink_to(tmp_path / "elsewhere")
    pulled = pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(paths=("data", "data/secret")))
    assert pulled.files == 0
    assert lacking(pulled) == dict.fromkeys(["code/data", "code/data/secret"], "a link; links are not followed")


def test_name_that_could_drive_a_terminal_stays_with_its_own_reason(job, tmp_path):
    put(job / "code" / "out" / "a\nb", 1)
    pulled = pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(paths=("out",)))
    [reason] = lacking(pulled).values()
    assert reason == r"damaged: 'code/out/a\nb' has a control character in its name"


def test_link_to_what_comes_by_its_own_name_lacks_nothing(job, tmp_path):
    (job / "export" / "latest").symlink_to("model.safetensors")
    assert lacking(pull(host_of(job), "j1", target=tmp_path / "home")) == {}


def test_limit_leaves_the_larger_of_the_named_files(job, tmp_path):
    put(job / "out" / "large", 9000)
    put(job / "out" / "small", 10)
    pulled = pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(paths=("out",), max_bytes=5000))
    assert lacking(pulled) == {"out": BEYOND_LIMIT} and (tmp_path / "home" / "out" / "small").exists()


def test_export_beyond_the_limit_was_not_asked_for(job, tmp_path):
    pulled = pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(max_bytes=1000))
    assert [left.reason for left in pulled.left_out] == [BEYOND_LIMIT] and pulled.not_home == ()


def test_incomplete_checkpoint_that_is_named_does_not_come(job, tmp_path):
    put(job / "checkpoints" / "step_1" / "w", 5)
    pulled = pull(host_of(job), "j1", target=tmp_path / "home", request=PullRequest(paths=("checkpoints/step_1",)))
    assert lacking(pulled) == {"checkpoints/step_1": "a checkpoint comes whole, by its folder, once it is complete"}


# --- the end of a launch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("final", "code"), [(Status(SUCCEEDED), 74), (Status(FAILED, code=7, reason="x"), 7)])
@pytest.mark.parametrize("gone", ["host", "job"])
def test_final_pull_that_reaches_nobody_is_the_last_line(job, tmp_path, capfd, final, code, gone):
    host = Host(None, str(job.parent.parent)) if gone == "job" else Host("me@127.0.0.1:1", "~/x", transport="fabric")
    record = JobRecord("j2", "", host.ssh, host.root, str(tmp_path / "home"), "")
    ways = {"bare": True, "detach": False, "as_json": False, "pull_limit": None, "pulls": True}
    assert follow_through(lambda screen, view: final, host, record, **ways) == code
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("not pulled: the results (") and last.endswith("pull j2")


def test_ctrl_c_between_a_jobs_end_and_its_pull_does_not_say_that_nothing_ran(job, tmp_path, capfd, monkeypatch):
    late = "deployer.commands.look.pull"

    class CtrlC:
        """While what brings results home is loaded."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == late:
                sys.meta_path.remove(self)
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, late, raising=False)
    monkeypatch.setattr(sys, "meta_path", [CtrlC(), *sys.meta_path])
    host, final = host_of(job), Status(SUCCEEDED)
    record = JobRecord("j1", "", host.ssh, host.root, str(tmp_path / "home"), "")
    ways = {"bare": True, "detach": False, "as_json": False, "pull_limit": None, "pulls": True}
    assert follow_through(lambda screen, view: final, host, record, **ways) == 74
    told = capfd.readouterr().err.splitlines()
    assert "j1 succeeded" in told and told[-1].startswith("not pulled: the results, or a part of them (interrupted)")
