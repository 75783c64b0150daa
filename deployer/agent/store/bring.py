"""Receives the files of a plan: first those that the client sends without being asked, then those that are still
missing.

Stdlib only, Python 3.8: this package runs on the host.
"""

import zlib
from typing import Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..host.errors import AgentError
from ..host.typed import parse
from ..wire.conversation import Call
from ..wire.frames import Frame
from . import tree
from .content import Store
from .intake import Blob, Intake, TreeWriter
from .spare import Spare, discard

MAX_UNPACKED = 1 << 20
"""Maximum bytes of one frame's body after decompression."""


def bring_trees(store: Store, wanted: List[str], call: Call, *, ahead: bool = False) -> Optional[Spare]:
    """Requests every missing tree from the client, then the blobs that these trees lack.

    `ahead`: the next frames of the call's stream were sent without a request and belong to the first tree. Returns that
    tree's files, if they were written while they arrived.
    """
    arrived = _take_ahead(store, wanted[0], call) if ahead else None
    try:
        _ask_for(store, [name for name in wanted if not store.has_tree(name)], call)
    except BaseException:
        discard(arrived)
        raise
    return arrived


def _ask_for(store: Store, names: Sequence[str], call: Call) -> None:
    for name in names:
        call.send_event("need_tree", name)
        entries = tree.load_entries(tree.unpacked(b"".join(frame.body for frame in call.receive())))
        if tree.root_hash(entries) != name:
            raise AgentError("host", "the file list that arrived is not the one announced; try again")
        missing = store.missing(entries)
        if missing:
            call.send_event("need_blobs", missing)
            sizes = tree.blobs_of(entries)
            if not _receive(Intake(store, [(digest, sizes[digest]) for digest in missing], missing), call.receive()):
                raise AgentError("host", "the file content that arrived ends too early; try again")
        store.save_tree(entries)


def drain(frames: Iterable[Frame], call: Call) -> None:
    """Asks the client to stop sending files without a request, and reads to the end of its stream."""
    call.send_event("enough")
    for _ in frames:
        pass


class _Announced(NamedTuple):
    """The announced files: the complete tree, and the blobs that follow."""

    entries: List[tree.Entry]
    blobs: List[Blob]


def _take_ahead(store: Store, name: str, call: Call) -> Optional[Spare]:
    frames = call.receive()
    announced, rest = _read_announcement(store, name, frames)
    if announced is None or store.has_tree(name):
        drain(frames, call)
        return None
    absent = set(store.missing(announced.entries))
    coming = sum(size for _, size in announced.blobs)
    if sum(size for digest, size in announced.blobs if digest in absent) * 2 < coming:
        drain(frames, call)  # most of it is here: asking for the rest is faster
        return None
    tree_writer = _tree_writer(store, announced, absent)
    intake = Intake(store, announced.blobs, absent, tree_writer)
    whole = len(announced.blobs) == len(tree.blobs_of(announced.entries))
    complete = _receive(intake, rest)
    arrived = tree_writer.finish() if tree_writer else None
    try:
        if complete and (whole or not store.missing(announced.entries)):
            store.save_tree(announced.entries)
    except BaseException:
        discard(arrived)
        raise
    return arrived


def _tree_writer(store: Store, announced: _Announced, absent: Iterable[str]) -> Optional[TreeWriter]:
    """A writer for a tree of which most files arrive; otherwise None, because a spare copy is better if little has
    changed."""
    files = sum(entry.mode != tree.LINK for entry in announced.entries)
    return TreeWriter(store, announced.entries) if len(set(absent)) * 2 > files else None


def _read_announcement(
    store: Store, name: str, frames: Iterator[Frame]
) -> Tuple[Optional[_Announced], Iterator[Frame]]:
    """The announced files; None if they are for another tree, or relative to a tree that is not here."""
    words = []
    for frame in frames:
        words.append(frame.body)
        if frame.head.get("news") == "end":
            break
    news = parse(tree.unpacked(b"".join(words)), tree.Changes, most=tree.MAX_BYTES)
    changed = news.put
    base = _base(store, news.base)
    if base is None:
        return None, frames
    entries = tree.changed(base, changed, news.gone)
    if tree.root_hash(entries) != name:
        return None, frames
    for entry in changed:
        tree.check_entry(entry)
    return _Announced(entries, list(tree.new_blobs(base, changed).items())), frames


def _base(store: Store, name: Optional[str]) -> Optional[Sequence[tree.Entry]]:
    if name is None:
        return ()
    try:
        return store.load_tree(name)
    except AgentError:
        return None


def _receive(intake: Intake, frames: Iterable[Frame]) -> bool:
    """Reads the blobs. Returns whether all announced ones arrived."""
    try:
        for frame in frames:
            intake.feed(body_of(frame))
        return intake.finish()
    except BaseException:
        intake.abort()
        raise


def body_of(frame: Frame) -> bytes:
    """The decompressed content of a frame."""
    return zlib.decompressobj().decompress(frame.body, MAX_UNPACKED) if frame.head.get("z") else frame.body
