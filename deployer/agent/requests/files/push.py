"""Writes a client's files into a job's folder, while the job runs or later.

A file appears complete under its name, by a rename. The project's code and the files of Torchferry and the trainer
cannot be written.
Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
import shutil
import stat
from typing import Dict, Iterable, List, NamedTuple, Sequence

from ...host.disk import fail, free_bytes, megabytes, no_room
from ...host.errors import AgentError
from ...host.files import is_path_below, put_in_place, remove
from ...host.layout import CHECKPOINT_MARKER, Job, Root
from ...host.locks import store_in_use
from ...host.typed import InvalidData, to_json
from ...store import tree
from ...store.blob import BlobWriter
from ...store.bring import body_of
from ...store.content import check_tree
from ...wire.conversation import Call
from ...wire.frames import Frame
from ..jobs import find_folder
from .fetched import note_fetched
from .view import Pushed

KEPT = re.compile(
    r"(job\.json|config(\.attempt_\d+)?\.yaml|git\.patch|status\.json|outcome\.json|memory_plan\.json|metrics\.jsonl"
    r"|samples\.jsonl|code|lib|control|ranks|logs|tokens|hang|export|profile|tensorboard)\Z|\.|.*\.tmp\Z"
)
"""Top-level names in a job's folder that are not for pushed files."""


class _PushRequest(NamedTuple):
    job: str
    into: str = ""
    """A folder below the job's folder."""
    force: bool = False
    """Overwrite files with other content."""


def push(root: Root, call: Call) -> None:
    """Requests a tree (`need_tree`), then the missing content (`need_blobs`), and sends the result as an event
    `pushed`. Raises AgentError for a name that is not for pushed files, and for an existing file with other content
    unless `force`; then nothing is written."""
    request = call.read(_PushRequest)
    job = find_folder(root, request.job)
    call.send_event("need_tree")
    entries = _below(request.into, _read_tree(call))
    with store_in_use(root):  # nobody collects the job meanwhile
        _check_names(job, entries)
        absent = [entry for entry in entries if not _is_there(job, entry)]
        _check_free(job, absent, force=request.force)
        _check_room(job, absent)
        for folder in tree.folders_of(absent):
            _make_folder(job, folder)
        _take(job, absent, call)
        note_fetched(job, [entry.path for entry in entries])  # who sent them has them
    call.send_event("pushed", to_json(Pushed(job.id, job.path, len(absent), len(entries) - len(absent))))


def _read_tree(call: Call) -> List[tree.Entry]:
    try:
        entries = tree.load_entries(tree.unpacked(b"".join(frame.body for frame in call.receive())))
    except InvalidData as damage:
        raise AgentError("usage", "the list of files is not understood: %s" % damage) from None
    check_tree(entries)
    links = [entry.path for entry in entries if entry.mode == tree.LINK]
    if links:
        raise AgentError("usage", "%s is a link; links are not pushed" % links[0])
    return sorted(entries, key=lambda entry: (_is_marker(entry), entry.path))


def _is_marker(entry: tree.Entry) -> bool:
    """Whether the file is a checkpoint's marker, which is written last: with it the checkpoint is complete."""
    return os.path.basename(entry.path) == CHECKPOINT_MARKER


def _below(into: str, entries: Sequence[tree.Entry]) -> List[tree.Entry]:
    return [entry._replace(path="%s/%s" % (into, entry.path)) for entry in entries] if into else list(entries)


def _check_names(job: Job, entries: Sequence[tree.Entry]) -> None:
    for entry in entries:
        if not is_path_below(entry.path):
            raise AgentError("usage", "%.200r is not a path below the job's folder" % entry.path)
        top = entry.path.split("/")[0]
        if KEPT.match(top):
            hint = "give the file another name, or a folder of yours: --into inputs"
            raise AgentError("usage", "%s in a job's folder is not for pushed files" % top, hint)
        folder = os.path.dirname(entry.path)
        real = os.path.realpath(os.path.join(job.path, folder))
        if real != os.path.join(os.path.realpath(job.path), folder).rstrip("/"):
            raise AgentError("usage", "%s lies behind a link of the job" % entry.path)


def _is_there(job: Job, entry: tree.Entry) -> bool:
    """Whether the same file exists already: an earlier push may have been interrupted."""
    path = os.path.join(job.path, entry.path)
    try:
        info = os.lstat(path)
        return stat.S_ISREG(info.st_mode) and info.st_size == entry.size and tree.file_hash(path) == entry.hash
    except OSError:
        return False


def _check_free(job: Job, entries: Sequence[tree.Entry], *, force: bool) -> None:
    for entry in entries:
        if os.path.isdir(os.path.join(job.path, entry.path)):
            raise AgentError(
                "usage", "%s is there already, a folder" % entry.path, "--into DIR puts the file elsewhere"
            )
    taken = [entry.path for entry in entries if os.path.lexists(os.path.join(job.path, entry.path))]
    if taken and not force:
        more = " and %d more" % (len(taken) - 1) if len(taken) > 1 else ""
        hint = "--force writes over it; --into DIR puts the files elsewhere"
        raise AgentError("usage", "%s%s is there already, with other content" % (taken[0], more), hint)


def _check_room(job: Job, entries: Sequence[tree.Entry]) -> None:
    needed, free = sum(entry.size for entry in entries), free_bytes(job.path)
    if needed > free:
        raise no_room(job.path, "%s are needed" % megabytes(needed), free)


def _make_folder(job: Job, folder: str) -> None:
    path = os.path.join(job.path, folder)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        if not os.path.isdir(path):  # a file of that name
            raise AgentError("usage", "%s is there already, and no folder" % folder) from None
        fail(path, error)


def _take(job: Job, entries: Sequence[tree.Entry], call: Call) -> None:
    """Writes the files as their content arrives; files with the same content are copies of the first."""
    of: Dict[str, List[tree.Entry]] = {}
    for entry in entries:
        of.setdefault(entry.hash, []).append(entry)
    if not of:
        return
    call.send_event("need_blobs", list(of))
    reader = _Reader(call.receive())
    for same in of.values():
        first = os.path.join(job.path, same[0].path)
        writer = BlobWriter(first, _aside(job), same[0].hash, same[0].size)
        try:
            for data in reader.parts(same[0].size):
                writer.write(data)
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        for other in same[1:]:
            _copy(first, _aside(job), os.path.join(job.path, other.path))
        for entry in same:
            os.chmod(os.path.join(job.path, entry.path), 0o755 if entry.mode == tree.EXECUTABLE else 0o644)
    reader.end()


def _aside(job: Job) -> str:
    return os.path.join(job.path, ".push-%d-%s" % (os.getpid(), os.urandom(8).hex()))


def _copy(source: str, aside: str, path: str) -> None:
    try:
        shutil.copyfile(source, aside)
        put_in_place(aside, path)
    except OSError as error:
        remove(aside)
        fail(path, error)


class _Reader:
    """Splits the received bytes into the files' contents, which follow one another."""

    def __init__(self, frames: Iterable[Frame]) -> None:
        self._bodies = (body_of(frame) for frame in frames)
        self._held = memoryview(b"")

    def parts(self, size: int) -> Iterable[memoryview]:
        while size:
            if not self._held:
                body = next(self._bodies, None)
                if body is None:
                    raise AgentError("lost", "the file content that arrived ends too early")
                self._held = memoryview(body)
            part, self._held = self._held[:size], self._held[size:]
            size -= len(part)
            yield part

    def end(self) -> None:
        """Reads up to the end of the client's stream."""
        for _ in self._bodies:
            pass
