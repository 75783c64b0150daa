"""The log view: every byte once, whole lines with their rank, bars in place or once a second."""

import io
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.launch.logview import LogView

PRINTABLE = st.characters(exclude_categories=["C", "Z"], include_characters=" \t\n")


def make_view(
    *, terminal: bool = False, bare: bool = False, raw: bool = False, clock=lambda: 0.0
) -> tuple[LogView, io.BytesIO, io.BytesIO]:
    out, err = io.BytesIO(), io.BytesIO()
    return LogView(out, err, terminal=terminal, bare=bare, raw=raw, clock=clock), out, err


def test_two_ranks_interleaved_whole_lines_with_their_rank():
    view, out, _ = make_view()
    view.feed("rank_0.log", 0, b"a half")
    view.feed("rank_1.log", 0, b"other\n")
    view.feed("rank_0.log", 6, b" line\n")
    assert out.getvalue() == b"[1] other\n[0] a half line\n"


def test_character_split_between_chunks_arrives_whole():
    view, out, _ = make_view()
    data = "zwölf ✓\n".encode()
    for i in range(len(data)):
        view.feed("rank_0.log", i, data[i : i + 1])
    assert out.getvalue() == b"[0] " + data


def test_chunk_sent_again_after_a_reconnect_shown_once():
    view, out, _ = make_view(bare=True)
    view.feed("rank_0.log", 0, b"one\ntwo\n")
    view.feed("rank_0.log", 4, b"two\nthree\n")
    assert out.getvalue() == b"one\ntwo\nthree\n"
    assert view.offsets == {"rank_0.log": 14}


def test_raw_to_a_pipe_passes_bytes_unchanged():
    view, out, _ = make_view(raw=True)
    view.feed("rank_0.log", 0, b" 50%\r100%\r\x1b[2J\x1b[1mdone\xff")
    view.finish()
    assert out.getvalue() == b" 50%\r100%\r\x1b[2J\x1b[1mdone\xff"


@pytest.mark.parametrize("raw", [False, True])
def test_one_rank_on_a_terminal_appears_as_it_comes_without_what_drives_it(raw):
    view, out, _ = make_view(terminal=True, bare=True, raw=raw)
    view.feed("rank_0.log", 0, b" 50%\r100%\r\x1b[1mdone\xff\xc3")
    assert out.getvalue() == b" 50%\r100%\r\x1b[1mdone\\xff"
    view.feed("rank_0.log", 20, b"\xa4\x1b[2J\x1b]0;owned\x07")
    view.finish()
    assert out.getvalue() == " 50%\r100%\r\x1b[1mdone\\xffä\\x1b]0;owned\\x07\x1b[0m".encode()


@pytest.mark.parametrize(("escapes", "line"), [(True, b"[0] \x1b[31mred\x1b[0m\n"), (False, b"[0] red\n")])
def test_colour_ends_with_its_line_and_is_left_out_where_none_is_wanted(escapes, line):
    view, out, _ = make_view()
    view.escapes = escapes
    view.feed("rank_0.log", 0, b"\x1b[31mred\nplain\n")
    assert out.getvalue() == line + b"[0] plain\n"


def test_bar_off_a_terminal_at_most_one_line_a_second_and_its_end():
    now = [0.0]
    view, out, _ = make_view(bare=True, clock=lambda: now[0])
    for step in range(100):
        now[0] = step * 0.05
        view.feed("rank_0.log", step * 4, b"%3d\r" % step)
    view.finish()
    lines = out.getvalue().split()
    assert lines[0] == b"0" and lines[-1] == b"99"
    assert len(lines) <= 7


def test_bar_on_a_terminal_drawn_in_place_and_cleared_for_a_line():
    view, out, _ = make_view(terminal=True)
    view.feed("rank_0.log", 0, b"10%\r20%\rready\n")
    assert out.getvalue() == b"[0] 10%\r\x1b[K[0] 20%\r\x1b[K[0] ready\n"


def test_crlf_is_one_line_end_also_when_split():
    view, out, _ = make_view(bare=True)
    view.feed("rank_0.log", 0, b"a\r")
    view.feed("rank_0.log", 2, b"\nb\r\n")
    assert out.getvalue() == b"a\nb\n"


def test_last_line_without_an_end_shown_at_the_end():
    view, out, _ = make_view()
    view.feed("rank_3.log", 0, b"dying words")
    assert out.getvalue() == b""
    view.finish()
    assert out.getvalue() == b"[3] dying words\n"


def test_line_longer_than_the_limit_written_in_parts_with_one_prefix():
    view, out, _ = make_view()
    for i in range(5):
        view.feed("rank_0.log", i * 40000, b"x" * 40000)
    view.feed("rank_0.log", 200000, b"\n")
    assert out.getvalue() == b"[0] " + b"x" * 200000 + b"\n"


@pytest.mark.parametrize("launcher", [False, True])
def test_set_up_goes_to_stderr_and_torchruns_words_only_when_asked_for(launcher):
    view, out, err = make_view()
    view.launcher = launcher
    view.feed("launcher.log", 0, b"W torchrun says\n")
    view.feed("prepare.log", 0, b"installing\n")
    assert out.getvalue() == b""
    assert err.getvalue() == launcher * b"W torchrun says\n" + b"installing\n"
    assert view.offsets == {"launcher.log": 16, "prepare.log": 11}


def test_last_words_of_an_attempt_come_before_the_next_attempts_first():
    view, out, _ = make_view()
    view.feed("rank_0.log", 0, b"dying words")
    view.feed("attempt_2/rank_0.log", 0, b"again\n")
    view.feed("attempt_2/launcher.log", 0, b"W torchrun says\n")
    assert out.getvalue() == b"[0] dying words\n[0] again\n"
    assert view.offsets == {"rank_0.log": 11, "attempt_2/rank_0.log": 6, "attempt_2/launcher.log": 16}


@given(st.text(PRINTABLE, max_size=200).map(str.encode), st.lists(st.integers(1, 40), min_size=1))
def test_lines_come_whole_and_in_order_however_they_are_cut(text, sizes):
    view, out, _ = make_view()
    position = 0
    for size in itertools.cycle(sizes):
        if position >= len(text):
            break
        view.feed("rank_0.log", position, text[position : position + size])
        position += size
    view.finish()
    lines = text.split(b"\n")
    shown = lines if lines[-1] else lines[:-1]
    assert out.getvalue() == b"".join(b"[0] " + line + b"\n" for line in shown)


HOSTILE = (
    "\x1b",
    "\x1b[",
    "\x1b]0;x",
    "\x07",
    "\x1b[2J",
    "\x1b[31m",
    "\x1b[8",
    "m",
    "K",
    "0",
    ";",
    "\r",
    "\n",
    "\x9b",
    "\u202e",
    "é",
)


@given(
    st.lists(st.sampled_from([*(text.encode() for text in HOSTILE), b"\x9b", b"\xff", b"\0", b"\xe2\x80"])),
    st.lists(st.integers(1, 5), min_size=1),
    st.booleans(),
    st.booleans(),
)
def test_nothing_of_a_log_drives_a_terminal_however_it_is_cut(parts, sizes, bare, terminal):
    view, out, _ = make_view(terminal=terminal, bare=bare)
    text, position = b"".join(parts), 0
    for size in itertools.cycle(sizes):
        if position >= len(text):
            break
        view.feed("rank_0.log", position, text[position : position + size])
        position += size
    view.finish()
    left = re.sub(r"\x1b\[[\d;]*m|\x1b\[0?K", "", out.getvalue().decode())
    assert all(char.isprintable() or char in "\n\r\t" for char in left), ascii(left)
