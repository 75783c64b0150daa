"""Logs that are renamed, removed, cut and replaced while they are read: every byte is shown, every change is told."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from deployer.agent.host.layout import Job
from deployer.agent.job.progress import output_fingerprint
from deployer.agent.logs.identity import LogMark
from deployer.agent.logs.read import Chosen, LogReader, last_lines, log_names, log_path, tail_offsets

LINE = b"a line of some length\n"


class Written:
    """A rank's log as its program has it open, with the record of its wrapper."""

    def __init__(self, job: Job) -> None:
        self.path = Path(job.logs(1)) / "rank_0.log"
        self.path.parent.mkdir(parents=True)
        self.file: BinaryIO = self.path.open("ab", buffering=0)
        Path(job.ranks(1)).mkdir(parents=True)
        record = {"pid": os.getpid(), "log_inode": os.fstat(self.file.fileno()).st_ino}
        (Path(job.ranks(1)) / "rank_0.json").write_text(json.dumps(record))

    def say(self, *lines: bytes) -> None:
        for line in lines:
            self.file.write(line + b"\n")

    def moved(self) -> Path:
        return self.path.rename(self.path.with_name("rank_0.log.1"))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(str(tmp_path / "jobs" / "j"))


class Client:
    """What a client holds: bytes of each file, and where it stands; each reader is one connection."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.shown: dict[str, bytes] = {}
        self.told: list[tuple[str, str, str]] = []
        self.marks: dict[str, str] = {}
        self.reader = LogReader(job)

    def look(self) -> None:
        while chunks := self.reader.poll():
            for chunk in chunks:
                assert chunk.offset == len(self.shown.get(chunk.file, b""))
                self.shown[chunk.file] = self.shown.get(chunk.file, b"") + chunk.data
                self.marks[chunk.file] = chunk.mark
        self.told += [tuple(change) for change in self.reader.changes]
        self.reader.changes.clear()

    def connect_again(self) -> None:
        self.reader.close()
        offsets = {file: len(data) for file, data in self.shown.items()}
        self.reader = LogReader(self.job, offsets=offsets, marks=self.marks)


def rename(log: Written) -> None:
    log.moved()
    log.say(b"three")


def remove(log: Written) -> None:
    log.path.unlink()
    log.say(b"three")


def replace(log: Written) -> None:
    log.moved()
    log.path.write_bytes(b"new\n")
    log.say(b"three")


def cut(log: Written) -> None:
    os.truncate(log.path, 0)
    log.say(b"three")


def cut_and_grow(log: Written) -> None:
    os.truncate(log.path, 0)
    log.say(b"three", b"and more than there was before")


def swap(log: Written) -> None:
    log.path.unlink()
    log.file.close()
    log.path.write_bytes(b"three\n" + 9 * LINE)


BEFORE = b"one\ntwo\n"
WENT_ON = {"rank_0.log": BEFORE + b"three\n"}
ANEW = {"rank_0.log": BEFORE, "rank_0.log~2": b"three\n"}
CASES: dict[str, tuple[Callable[[Written], None], dict[str, bytes], list[tuple[str, str, str]]]] = {
    "renamed": (rename, WENT_ON, [("rank_0.log", "renamed", "rank_0.log.1")]),
    "removed": (remove, WENT_ON, [("rank_0.log", "removed", "")]),
    "replaced": (
        replace,
        {**WENT_ON, "rank_0.log~2": b"new\n"},
        [("rank_0.log", "renamed", "rank_0.log.1")],
    ),
    "cut": (cut, ANEW, [("rank_0.log~2", "cut", "")]),
    "cut, and longer than before": (
        cut_and_grow,
        {**ANEW, "rank_0.log~2": b"three\nand more than there was before\n"},
        [("rank_0.log~2", "cut", "")],
    ),
}


@pytest.mark.parametrize("reconnects", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_byte_is_shown_once_whatever_becomes_of_the_name(job: Job, case: str, reconnects: bool) -> None:
    change, shown, told = CASES[case]
    log, client = Written(job), Client(job)
    log.say(b"one", b"two")
    client.look()
    with writer_of(job, log):
        change(log)
        if reconnects:
            client.connect_again()
        client.look()
        client.look()
        if reconnects:
            client.connect_again()
            client.look()
    assert client.shown == shown
    assert list(dict.fromkeys(client.told)) == told


class writer_of:
    """A process that has the log open as its stdout, as a rank has, and is named in the record."""

    def __init__(self, job: Job, log: Written) -> None:
        self.record = Path(job.ranks(1)) / "rank_0.json"
        self.log = log

    def __enter__(self) -> None:
        self.process = subprocess.Popen(["sleep", "1000"], stdout=self.log.file)
        record = json.loads(self.record.read_text())
        self.record.write_text(json.dumps({**record, "pid": self.process.pid}))

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def test_file_that_was_swapped_between_two_connections_is_another_one(job: Job) -> None:
    log, client = Written(job), Client(job)
    log.say(b"one", b"two")
    client.look()
    swap(log)
    client.connect_again()
    client.look()
    assert client.shown == {"rank_0.log": BEFORE, "rank_0.log~2": b"three\n" + 9 * LINE}
    assert [what for _, what, _ in client.told] == ["replaced"]


def test_renamed_log_is_found_by_who_looks_later_and_a_removed_one_is_missed_in_words(job: Job) -> None:
    log = Written(job)
    log.say(b"one", b"two")
    moved, before = log.moved(), output_fingerprint(job, 1)
    names = log_names(job, 1)
    assert [name.text for name in names] == ["rank_0.log"] and log_path(job, names[0]) == str(moved)
    assert last_lines(job, Chosen(ranks={0}), 1) == b"two\n" and tail_offsets(job, 1) == {"rank_0.log": 4}
    reader = LogReader(job)
    reader.stop_here()
    log.say(b"later")
    assert output_fingerprint(job, 1) != before, "its job would count as stalled"
    assert [chunk.data for chunk in reader.poll()] == [BEFORE]
    assert [change.what for change in reader.changes] == ["renamed"]
    log.file.close()
    moved.unlink()
    gone = LogReader(job)
    assert gone.poll() == gone.poll() == [] and [tuple(change) for change in gone.changes] == [
        ("rank_0.log", "gone", "")
    ]


def test_file_system_that_numbers_its_files_anew_shows_nothing_twice(job: Job) -> None:
    log, client = Written(job), Client(job)
    log.say(b"one", b"two")
    client.look()
    client.marks = {name: LogMark.parse(mark)._replace(inode=1).text for name, mark in client.marks.items()}
    client.connect_again()
    log.say(b"three")
    client.look()
    assert (client.shown, client.told) == (WENT_ON, [])


@pytest.mark.parametrize("text", ["", "x", "1:zz", "-", ":", "9" * 5000, "1:" + "00" * 99])
def test_mark_that_is_none_tells_nothing_wrong(text: str) -> None:
    assert len(LogMark.parse(text).tail) <= 16
