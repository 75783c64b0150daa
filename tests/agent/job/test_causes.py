"""Why an attempt died: what its words and its host tell together, and what is said to be missing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.gpus.health import read_xids
from deployer.agent.job.causes import FailureContext, find_causes, named_files
from deployer.agent.job.host_resources import (
    FileSystemUsage,
    Gpus,
    HostResources,
    Limits,
    MemoryUsage,
    in_time,
    read_file_systems,
    read_gpus,
)
from deployer.agent.job.missing import explain_here, find_missing
from deployer.agent.job.status import Missing
from tests.support.smi import fake_smi
from tests.support.storing import disk

GIB = 1 << 30
JOB = FileSystemUsage("/r/jobs/j", ("the job folder",), 9 * GIB, 1000)
SHM = FileSystemUsage("/dev/shm", ("/dev/shm",), GIB, None)
LIMITS = Limits(open_files=1024, processes=4000, group_memory=2 * 10**9, group_processes=512, group_used=20)
START = HostResources((JOB, SHM), LIMITS, MemoryUsage(16 * 10**9, 8 * 10**9))


def told(words: str = "", now: HostResources = START, start: HostResources | None = START, **more: Any) -> list[str]:
    return [cause.line for cause in find_causes(FailureContext(words, now, start, **more))]


def file_systems(job: FileSystemUsage = JOB, shm: FileSystemUsage = SHM) -> HostResources:
    return START._replace(file_systems=(job, shm))


FULL = JOB._replace(free_bytes=0)
CASES = {
    "nothing was said, nothing has changed": (told(), []),
    "a full disk alone": (
        told(now=file_systems(FULL)),
        ["the file system of the job folder (/r/jobs/j) had 0 bytes free when it ended"],
    ),
    "a full disk that the job speaks of": (
        told("OSError: [Errno 28] No space left on device", now=file_systems(FULL)),
        [
            '"[Errno 28] No space left on device": '
            "the file system of the job folder (/r/jobs/j) had 0 bytes free when it ended"
        ],
    ),
    "full from the start, and nothing is said of it": (told(now=file_systems(FULL), start=file_systems(FULL)), []),
    "full while it ran": (
        told(now=file_systems(JOB._replace(least_bytes=4096))),
        ["the file system of the job folder (/r/jobs/j) had only 4.1 kB free while it ran (9.7 GB when it had ended)"],
    ),
    "inodes": (
        told(now=file_systems(JOB._replace(inodes_free=0))),
        ["the file system of the job folder (/r/jobs/j) had no inode free when it ended (9.7 GB of space)"],
    ),
    "words without a full disk": (
        told("write: No space left on device"),
        [
            '"No space left on device", and when it had ended there were free: 9.7 GB of the job folder (/r/jobs/j); '
            "1.1 GB of /dev/shm"
        ],
    ),
    "shared memory": (
        told(now=file_systems(shm=SHM._replace(free_bytes=0)), signal=signal.SIGBUS),
        ["the file system of /dev/shm had 0 bytes free when it ended"],
    ),
    "quota": (
        told("Disk quota exceeded"),
        ['"Disk quota exceeded" in its last lines: the disk refused a write or a read'],
    ),
    "read-only": (
        told(now=file_systems(JOB._replace(read_only=True))),
        ["the file system of the job folder (/r/jobs/j) became read-only while it ran"],
    ),
    "open files": (
        told("OSError: [Errno 24] Too many open files"),
        ['"[Errno 24] Too many open files": one process may have 1024 open here (ulimit -n)'],
    ),
    "threads of the group": (
        told(now=START._replace(limits=LIMITS._replace(forks_refused=3))),
        ["its control group may have 512 processes and threads"],
    ),
    "threads of the account": (
        told("RuntimeError: can't start new thread"),
        ['"can\'t start new thread": this account may have 4000 processes and threads (ulimit -u)'],
    ),
    "memory": (told("Cannot allocate memory"), ['"Cannot allocate memory": its control group may take 2.0 GB']),
    "the kernel's kill of a worker": (
        told(oom=True),
        ["the kernel killed a process for lack of memory: its control group may take 2.0 GB"],
    ),
    "a GPU that fell off": (
        told(now=START._replace(gpus=Gpus(gone=("GPU-a",)))),
        ["nvidia-smi shows no GPU GPU-a any more: it has fallen off"],
    ),
    "others on the GPU, unspoken of": (told(now=START._replace(gpus=Gpus(others=("GPU 0: pid 7",)))), []),
    "others on the GPU": (
        told("torch.OutOfMemoryError: CUDA out of memory.", now=START._replace(gpus=Gpus(others=("GPU 0: pid 7",)))),
        ['"OutOfMemoryError", and others compute there: GPU 0: pid 7'],
    ),
    "time of the CPU": (
        told(now=START._replace(limits=LIMITS._replace(cpu_s=60)), signal=signal.SIGXCPU),
        ["one process may compute for 60 s here (ulimit -t)"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_cause_is_named_where_words_and_host_agree_and_what_changed_is_told(case: str) -> None:
    found, expected = CASES[case]
    assert found == expected


def test_path_that_a_refusal_names_is_looked_at(tmp_path: Path) -> None:
    words = "ok /etc/passwd\nOSError: [Errno 28] No space left on device: '/scratch/a b/x'"
    assert named_files(words) == ("/scratch/a b/x",)
    with disk(tmp_path / "small", "size=64k") as small:
        (small / "full").write_bytes(bytes(64 << 10))
        found = read_file_systems({str(tmp_path): "the job folder", f"{small}/no/x": str(small)})
    assert [(fs.uses, fs.free_bytes > 0) for fs in found] == [(("the job folder",), True), ((str(small),), False)]


def test_what_never_answers_is_not_waited_for() -> None:
    reading, writing = os.pipe()
    assert in_time(lambda: os.read(reading, 1), b"gave up", timeout_s=0.05) == b"gave up"
    os.write(writing, b"x")
    assert in_time(lambda: 1 // 0, 7) == 7


def test_gpus_are_asked_for_again(tmp_path: Path) -> None:
    env = fake_smi(tmp_path, gpus="0, GPU-a, NVIDIA H100, 81559, 4\n", apps=f"GPU-a, {os.getpid()}, 3000\n")
    found = read_gpus(["GPU-a", "GPU-b/MIG-1"], env, ours=(), since_boot_s=1e12)
    assert found.gone == ("GPU-b",) and f"pid {os.getpid()}" in found.others[0]
    assert read_gpus(["GPU-a"], env, ours=[os.getpid()], since_boot_s=1e12) == Gpus()
    broken = fake_smi(tmp_path, then="echo 'Unable to determine the device handle'; exit 15")
    assert "ended with 15: Unable to determine" in read_gpus(["GPU-a"], broken, ours=(), since_boot_s=1e12).driver


def test_messages_of_the_driver_have_their_time() -> None:
    log = "<6>[  12.5] usb\n<3>[ 4711.250] NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off\nNVRM: Xid (x): 13"
    assert [(xid.number, xid.boot_s) for xid in read_xids(log)] == [(79, 4711.25), (13, None)]


# --- missing files ----------------------------------------------------------------------------------------------------

WORDS = {
    "FileNotFoundError: [Errno 2] No such file or directory: 'data/a b.txt'": "data/a b.txt",
    "FileNotFoundError: [Errno 2] No such file or directory: '{code}/data/x'": "data/x",
    "python: can't open file '{code}/tool.py': [Errno 2] No such file or directory": "tool.py",
    "cat: data/x.txt: No such file or directory": "data/x.txt",
    "ls: cannot access 'data': No such file or directory": "data",
    "go.sh: line 3: ./run.sh: No such file or directory": "run.sh",
    "sh: 1: cannot open data: No such file": "data",
    "sh: 0: Can't open run.sh": "run.sh",
    "go.sh: 2: cd: can't cd to data": "data",
    "sh: 1: ./tool: not found": "tool",
    "Error: there is no file {code}/data/rows.jsonl": "data/rows.jsonl",
    "Error: model.name=models/own: there is no such folder": "models/own",
    "sh: 1: cannot create out/x: Directory nonexistent": "out/x",
    "RuntimeError: Parent directory out/a does not exist.": "out/a",
    "FileNotFoundError: Unable to find '{code}/data/train.json'": "data/train.json",
    "OSError: Unable to open file (name = 'd/x.h5', errno = 2, error message = 'No such file or directory')": "d/x.h5",
    'Error: Os { code: 2, kind: NotFound, message: "No such file or directory" } for "data/x.bin"': "data/x.bin",
    "FileNotFoundError: /home/me/data/x.jsonl: no such file or folder": "/home/me/data/x.jsonl",
}


@pytest.mark.parametrize("line", WORDS)
def test_missing_file_is_found_in_the_words_of_many_programs(tmp_path: Path, line: str) -> None:
    found = find_missing(f"epoch 1\n{line.replace('{code}', str(tmp_path))}\n", str(tmp_path))
    assert Missing(WORDS[line]) in found and len(found) <= 3, found


def test_missing_module_is_one_and_what_is_there_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    words = "cat: here: No such file or directory\nModuleNotFoundError: No module named 'own.tools'\nall fine: a/b"
    assert find_missing(words, str(tmp_path)) == (Missing("own.tools", "module"),)
    assert len(find_missing("\n".join(f"cat: f{n}: No such file or directory" for n in range(99)), "/")) == 8


def test_host_tells_of_case_and_of_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "Data").mkdir()
    (tmp_path / "model").symlink_to("/home/me/model")
    missing = (
        Missing("data/x"),
        Missing("model/config.json"),
        Missing("other"),
        Missing("/abs"),
        Missing("m", "module"),
    )
    assert [(cause.line, cause.hint) for cause in explain_here(missing, str(tmp_path))] == [
        ("data/x is not there, but Data is: names differ by case on this host", "write Data"),
        (
            "model is a link to /home/me/model, which this host does not have",
            "--include model sends what the link leads to",
        ),
    ]
