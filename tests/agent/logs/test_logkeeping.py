"""What is kept beside and of a log: when it grew, which lines match, and the size limit that frees its oldest part."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.agent.host.errors import AgentError
from deployer.agent.host.layout import Job
from deployer.agent.logs.dropped import Dropped
from deployer.agent.logs.grep import LINE_BYTES, LineFilter, Match
from deployer.agent.logs.keep import LogLimit, first_to_keep
from deployer.agent.logs.read import Chunk, LogReader
from deployer.agent.logs.times import Entry, TimeIndex, offsets_since, read_index, thinned
from tests.support.jobs import make_plan, python, run_job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(str(tmp_path / "jobs" / "j"))
    Path(job.logs(1)).mkdir(parents=True)
    return job


# --- lines that match -------------------------------------------------------------------------------------------------


def matches(text: bytes, pattern: str, cuts: list[int]) -> list[Match]:
    lines = LineFilter(pattern)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    chunks = [Chunk("rank_0.log", a, text[a:b]) for a, b in itertools.pairwise(edges)]
    return [match for chunk in chunks for match in lines.feed(chunk)] + lines.end()


@given(
    st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"a").replace(b"\0", b"b")), max_size=20),
    st.lists(st.integers(0, 300), max_size=8),
)
def test_filter_gives_the_lines_that_grep_gives_however_the_text_is_cut(lines, cuts):
    text = b"\n".join(lines)
    found = matches(text, "a+b?", cuts)
    grep = subprocess.run(["grep", "-a", "ab*"], input=text, capture_output=True, env={"LC_ALL": "C", **os.environ})
    shown = b"".join(match.data for match in found)
    ends = b"\n" if shown and not shown.endswith(b"\n") else b""
    assert shown + ends == grep.stdout
    assert all(text[m.offset : m.offset + len(m.data)] == m.data for m in found)


def test_filter_of_neighbours_gives_one_piece_and_a_gap_begins_a_new_one():
    assert [(m.offset, bytes(m.data)) for m in matches(b"x1\nx2\nno\nx3\n", "^x.$", [])] == [
        (0, b"x1\nx2\n"),
        (9, b"x3\n"),
    ]


def test_endless_line_is_searched_and_shown_up_to_a_bound_and_nothing_of_its_rest():
    long = b"x" * 1_000_000 + b"needle"
    found = matches(b"no\n" + long + b"\nx then\n", "x", list(range(0, 1_100_000, 40_000)))
    assert [(m.offset, len(m.data), m.cut) for m in found] == [(3, LINE_BYTES, True), (1_000_010, 7, False)]
    assert matches(long + b"\n", "needle", list(range(0, 1_100_000, 40_000))) == []


def test_dropped_part_between_chunks_ends_a_line():
    lines = LineFilter("a|b")
    found = lines.feed(Chunk("rank_0.log", 0, b"half a")) + lines.feed(Chunk("rank_0.log", 100, b"b whole\n"))
    assert [(m.offset, bytes(m.data)) for m in found] == [(0, b"half a"), (100, b"b whole\n")]


def test_pattern_that_is_none_names_itself():
    with pytest.raises(AgentError, match=r"'\(' is no regular expression"):
        LineFilter("(")


# --- when it was written ----------------------------------------------------------------------------------------------

LOG = "rank_0.log"


@pytest.mark.parametrize(
    ("clock", "since", "offset"),
    [
        ([100, 101, 102, 103], 102, 20),  # in step with the time since boot
        ([100, 101, 102, 103], 100.5, 10),
        ([100, 101, 102, 103], 99, 0),
        ([100, 101, 102, 103], 200, 40),
        ([0, 1, 102, 103], 102, 20),  # set forward from 1970 on the way
        ([9000, 9001, 102, 103], 102, 20),  # set back from the future
        ([9000, 9001, 102, 103], 100.5, 10),
    ],
)
def test_beginning_is_found_by_time_also_when_the_clock_jumped(clock, since, offset):
    entries = [Entry(float(c), 50.0 + i, {LOG: 10 * (i + 1)}) for i, c in enumerate(clock)]
    assert offsets_since(entries, since).get(LOG, 0) == offset


def test_index_has_a_line_for_each_growth_and_survives_a_torn_one(job):
    index = TimeIndex(job.logs(1))
    for size in (1, 1, 5):
        index.note({LOG: size})
    with (Path(job.logs(1)) / "times.jsonl").open("ab") as f:
        f.write(b'[17, 1, {"rank_0.log\n')
    index.note({LOG: 9})
    assert [entry.sizes[LOG] for entry in read_index(job.logs(1))] == [1, 5, 9]


def test_index_of_a_long_job_stays_small_and_keeps_its_newest_lines(job):
    index = TimeIndex(job.logs(1), max_bytes=5000)
    for size in range(1, 1000):
        index.note({LOG: size})
    sizes = [entry.sizes[LOG] for entry in read_index(job.logs(1))]
    assert (Path(job.logs(1)) / "times.jsonl").stat().st_size < 5100
    assert sizes == sorted(sizes) and sizes[-20:] == list(range(980, 1000)) and sizes[0] < 300


def test_thinning_leaves_the_newest_quarter_alone():
    lines = [b"%d" % i for i in range(8)]
    assert thinned(lines) == [b"0", b"2", b"4", b"6", b"7"]


# --- the size limit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "first_kept", "first"), [(1000, 0, None), (1001, 0, 101), (1500, 600, None), (1601, 600, 701)]
)
def test_first_byte_to_keep_leaves_nine_tenths_of_the_limit(size, first_kept, first):
    assert first_to_keep(size, first_kept, 1000) == first


def write_lines(path: Path, first: int, last: int) -> None:
    with path.open("ab") as f:
        f.write(b"".join(b"%07d\n" % i for i in range(first, last)))


def test_beyond_the_limit_the_oldest_lines_give_their_room_back_and_readers_hear_of_it(job):
    log = Path(job.logs(1)) / LOG
    limit = LogLimit(job.logs(1), 400_000)
    write_lines(log, 0, 100_000)
    assert limit.apply({LOG: 800_000}) is None
    assert log.stat().st_size == 800_000 and log.stat().st_blocks * 512 <= 400_000
    first = json.loads((Path(job.logs(1)) / "dropped.json").read_text())[LOG]
    chunks = LogReader(job).poll()
    assert (chunks[0].offset, chunks[0].dropped, first % 8) == (first, first, 0)
    assert b"".join(c.data for c in chunks) == b"".join(b"%07d\n" % i for i in range(first // 8, 100_000))
    assert sum(c.dropped for c in chunks) == first and first >= 440_000


def test_new_supervisor_goes_on_where_the_former_one_had_freed(job):
    log = Path(job.logs(1)) / LOG
    write_lines(log, 0, 100_000)
    LogLimit(job.logs(1), 400_000).apply({LOG: 800_000})
    before = Dropped(job.logs(1)).first_kept(LOG)
    LogLimit(job.logs(1), 400_000).apply({LOG: 800_000})
    assert Dropped(job.logs(1)).first_kept(LOG) == before


def test_reader_beside_a_dropping_supervisor_sees_whole_lines_in_order_or_a_gap_that_is_told(job):
    log, limit, reader = Path(job.logs(1)) / LOG, LogLimit(job.logs(1), 200_000), LogReader(job)
    log.touch()

    def write() -> None:
        for i in range(400):
            write_lines(log, i * 1000, i * 1000 + 1000)
            limit.apply({LOG: log.stat().st_size})

    writer = threading.Thread(target=write)
    writer.start()
    position = 0
    while writer.is_alive() or position < log.stat().st_size:
        for chunk in reader.poll():
            position += chunk.dropped
            assert chunk.offset == position
            end = position + len(chunk.data)
            numbers = b"".join(b"%07d\n" % i for i in range(position // 8, end // 8 + 1))
            assert chunk.data == numbers[position % 8 : position % 8 + len(chunk.data)]
            position = end
    writer.join()
    assert position == 3_200_000


@pytest.fixture
def disk_without_holes(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "ramfs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "ramfs", "none", folder], check=False).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_job_on_a_disk_that_cannot_free_a_part_of_a_file_keeps_all_and_says_so(disk_without_holes):
    plan = make_plan(python("print('x' * 300_000)"), policy={"log_max_bytes": 100_000})
    status = run_job(disk_without_holes, "holes", plan)
    (warning,) = status.warnings
    assert warning.startswith("--log-max: this disk cannot free") and status.state == "succeeded"
    logs = disk_without_holes / "jobs" / "holes" / "logs" / "attempt_1"
    assert (logs / LOG).read_bytes() == b"x" * 300_000 + b"\n" and not (logs / "dropped.json").exists()
    shutil.rmtree(disk_without_holes / "jobs")


def test_supervisor_notes_times_and_keeps_the_limit_of_the_plan(tmp_path):
    plan = make_plan(python("for i in range(40_000): print('%07d' % i)"), policy={"log_max_bytes": 100_000})
    status = run_job(tmp_path, "small", plan)
    logs = tmp_path / "jobs" / "small" / "logs" / "attempt_1"
    assert "warnings" not in status and (logs / LOG).stat().st_blocks * 512 <= 104_000
    assert read_index(str(logs))[-1].sizes[LOG] == 320_000
