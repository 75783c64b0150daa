"""Logs by byte offset: nothing lost, nothing twice, whatever the bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deployer.agent.host.layout import Job
from deployer.agent.logs import read
from deployer.agent.logs.read import CHUNK_BYTES, Chosen, LogReader


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(str(tmp_path / "jobs" / "j"))
    Path(job.logs(1)).mkdir(parents=True)
    return job


def write(job: Job, name: str, data: bytes, attempt: int = 1) -> None:
    with (Path(job.logs(attempt)) / name).open("ab") as f:
        f.write(data)


def read_all(reader: LogReader) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    while chunks := reader.poll():
        for chunk in chunks:
            assert chunk.offset == len(found.get(chunk.file, b""))
            assert 0 < len(chunk.data) <= CHUNK_BYTES
            found[chunk.file] = found.get(chunk.file, b"") + chunk.data
    return found


def test_reader_brings_every_byte_of_every_file(job: Job) -> None:
    data = {"prepare.log": b"pip\n", "launcher.log": b"", "rank_0.log": os.urandom(3_000_000), "rank_10.log": b"\xff\r"}
    for name, content in data.items():
        write(job, name, content)
    assert read_all(LogReader(job)) == {name: content for name, content in data.items() if content}


def test_one_poll_is_bounded_and_takes_turns(job: Job) -> None:
    for name in ("rank_0.log", "rank_1.log"):
        write(job, name, b"x" * 3_000_000)
    chunks = LogReader(job).poll()
    assert sum(len(c.data) for c in chunks) < read.POLL_BYTES + 2 * CHUNK_BYTES
    assert [c.file for c in chunks[:4]] == ["rank_0.log", "rank_1.log"] * 2


def test_reader_goes_on_where_it_was_and_finds_new_files(job: Job) -> None:
    write(job, "rank_0.log", b"one")
    reader = LogReader(job)
    assert [c.data for c in reader.poll()] == [b"one"]
    assert reader.poll() == []
    write(job, "rank_0.log", b"two")
    write(job, "rank_1.log", b"new")
    assert [(c.file, c.offset, c.data) for c in reader.poll()] == [("rank_0.log", 3, b"two"), ("rank_1.log", 0, b"new")]


def test_reader_resumes_from_given_offsets(job: Job) -> None:
    write(job, "rank_0.log", b"0123456789")
    reader = LogReader(job, offsets={"rank_0.log": 7})
    assert [(c.offset, c.data) for c in reader.poll()] == [(7, b"789")]


def test_reader_that_stops_here_takes_nothing_that_comes_later(job: Job) -> None:
    write(job, "rank_0.log", b"x" * CHUNK_BYTES + b"before")
    reader = LogReader(job)
    reader.stop_here()
    write(job, "rank_0.log", b"after" * CHUNK_BYTES)
    assert read_all(reader) == {"rank_0.log": b"x" * CHUNK_BYTES + b"before"}


def test_reader_of_some_ranks_shows_only_theirs(job: Job) -> None:
    for name in ("launcher.log", "rank_0.log", "rank_1.log", "rank_11.log"):
        write(job, name, b"x")
    assert [c.file for c in LogReader(job, chosen=Chosen(ranks={1})).poll()] == ["rank_1.log"]


def test_order_is_preparation_launcher_then_ranks_by_number(job: Job) -> None:
    for name in ("rank_10.log", "rank_2.log", "launcher.log", "prepare.log", "rank_x.log", "other"):
        write(job, name, b"x")
    assert [c.file for c in LogReader(job).poll()] == ["prepare.log", "launcher.log", "rank_2.log", "rank_10.log"]


def test_reader_takes_the_latest_attempt_once_there_is_one(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "jobs" / "j"))
    reader = LogReader(job)
    assert reader.poll() == []
    for attempt in (2, 10):
        Path(job.logs(attempt)).mkdir(parents=True)
        write(job, "rank_0.log", b"%d" % attempt, attempt)
    assert [c.data for c in reader.poll()] == [b"10"]


def test_reader_goes_on_into_the_next_attempts_files(job: Job) -> None:
    write(job, "rank_0.log", b"one")
    reader = LogReader(job)
    assert [c.file for c in reader.poll()] == ["rank_0.log"]
    write(job, "rank_0.log", b"+")
    Path(job.logs(2)).mkdir()
    write(job, "rank_0.log", b"two", attempt=2)
    assert [(c.file, c.offset, c.data) for c in reader.poll()] == [("rank_0.log", 3, b"+")]
    assert [(c.file, c.offset, c.data) for c in reader.poll()] == [("attempt_2/rank_0.log", 0, b"two")]


def test_reader_with_an_earlier_attempts_offsets_misses_nothing_of_it(job: Job) -> None:
    Path(job.logs(2)).mkdir()
    write(job, "rank_0.log", b"one")
    write(job, "rank_0.log", b"two", attempt=2)
    reader = LogReader(job, offsets={"rank_0.log": 1})
    assert [c.data for c in (*reader.poll(), *reader.poll())] == [b"ne", b"two"]


@pytest.mark.parametrize(
    ("content", "lines", "expected"),
    [
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\n\n", 2, b"b\n\n"),
        (b"a\nb\n", 5, b"a\nb\n"),
        (b"a\nb\n", 0, b""),
        (b"", 3, b""),
        (b"\n", 1, b"\n"),
        (b"x" * 200_000 + b"\nlast\n", 1, b"last\n"),
        (b"first\n" + b"x" * 200_000 + b"\nlast\n", 2, b"x" * 200_000 + b"\nlast\n"),
        (b"l\n" * 100_000, 60_000, b"l\n" * 60_000),
    ],
)
def test_tail_offset_gives_the_last_lines(job: Job, content: bytes, lines: int, expected: bytes) -> None:
    write(job, "rank_0.log", content)
    offset = read.tail_offsets(job, lines)["rank_0.log"]
    assert content[offset:] == expected


def test_tail_is_of_the_latest_attempt(job: Job) -> None:
    Path(job.logs(2)).mkdir()
    write(job, "rank_0.log", b"a\nb\n", attempt=2)
    assert read.tail_offsets(job, 1) == {"attempt_2/rank_0.log": 2}


@pytest.mark.parametrize(
    ("content", "offset", "expected"),
    [(b"one\ntwo\n", 6, 4), (b"one\ntwo\n", 4, 4), (b"one\n", 2, 0), (b"one\n", 0, 0), (b"x" * 99_999, 99_000, 99_000)],
)
def test_line_start_is_where_the_line_of_an_offset_begins(job: Job, content: bytes, offset: int, expected: int) -> None:
    write(job, "rank_0.log", content)
    assert read.line_start(str(Path(job.logs(1)) / "rank_0.log"), offset) == expected


def test_tail_of_an_endless_line_is_bounded(job: Job) -> None:
    write(job, "rank_0.log", b"bar\r" * 1_000_000)
    assert read.tail_offsets(job, 5) == {"rank_0.log": 4_000_000 - read.TAIL_BYTES}


def test_last_lines_of_a_rank(job: Job) -> None:
    write(job, "rank_1.log", b"one\ntwo\nthree")
    assert read.last_lines(job, Chosen(ranks={1}), 2) == b"two\nthree"
    assert read.last_lines(job, Chosen(ranks={0}), 2) == b""


def test_last_lines_without_a_rank_are_the_launchers_or_the_preparations(job: Job) -> None:
    write(job, "prepare.log", b"pip failed\n")
    assert read.last_lines(job, read.ALL, 5) == b"pip failed\n"
    write(job, "launcher.log", b"torchrun\n")
    assert read.last_lines(job, read.ALL, 5) == b"torchrun\n"
