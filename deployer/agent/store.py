"""The content-addressed store on a host: blobs by hash, trees by root hash, and copies of trees for jobs.

Everything appears by a rename, so that several agents may work at once and a reader sees all of it or nothing. Blobs
are not fsynced one by one (a thousand would take seconds); a blob that a power cut damaged is noticed when it is
copied, forgotten together with its tree, and asked for again by the next launch.

Stdlib only, Python 3.8: this package runs on the host.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import threading
from io import RawIOBase
from typing import Callable, Iterator, List, NoReturn, Optional, Sequence, Set, Union

from .errors import AgentError
from .layout import Root
from .packs import Packs, names, read_index
from .tree import EXECUTABLE, LINK, Entry, check_entry, content_hash, dump_entries

_HASH = re.compile(r"[0-9a-f]{40}\Z")
_FICLONE = 0x40049409
_CHUNK = 1 << 20
THREADS = 3


class Store:
    """Blobs and trees below a root. AgentError of kind host: the disk says no; of kind need: the client must send."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.packs = Packs(root)

    def has_tree(self, root_hash: str) -> bool:
        return os.path.exists(self._tree_path(root_hash))

    def save_tree(self, entries: Sequence[Entry]) -> str:
        """Keeps a tree and returns its root hash. AgentError when an entry could lead out of the tree."""
        check_tree(entries)
        data = dump_entries(sorted(entries))
        root_hash = content_hash(data)
        path = self._tree_path(root_hash)
        if not os.path.exists(path):
            try:
                self._write_whole(path, data)
            except OSError as error:
                fail(path, error)
        return root_hash

    def load_tree(self, root_hash: str) -> List[Entry]:
        """The entries of a tree. AgentError of kind need when it is missing or damaged."""
        path = self._tree_path(root_hash)
        try:
            with open(path, "rb") as f:
                data = f.read()
        except FileNotFoundError:
            raise AgentError("need", "this host does not have the tree %s" % root_hash)
        except OSError as error:
            fail(path, error)
        if content_hash(data) != root_hash:
            _remove(path)
            raise AgentError("need", "this host's copy of the tree %s was damaged" % root_hash)
        entries = [Entry(*row) for row in json.loads(data)]
        check_tree(entries)
        return entries

    def missing(self, entries: Sequence[Entry]) -> List[str]:
        """Hashes of the blobs that are not here (or have the wrong size), each once, in the entries' order."""
        wanted = {e.hash: e.size for e in entries if e.mode != LINK}
        return [digest for digest, size in wanted.items() if not self._has_blob(digest, size)]

    def _has_blob(self, digest: str, size: int) -> bool:
        return _has_size(self._blob_path(digest), size) or self.packs.size(digest) == size

    def writer(self, digest: str, size: int) -> "BlobWriter":
        """Takes the bytes of one blob. AgentError when the file system has not enough room for it."""
        path = self._blob_path(digest)
        self.check_room(size)
        return BlobWriter(path, self.aside("blob"), digest, size)

    def check_room(self, size: int) -> None:
        """AgentError when the file system has not so many bytes free, or nothing can be written there."""
        try:
            free = _free_bytes(self.make_tmp())
        except OSError as error:
            fail(self.root.tmp, error)
        if size > free:
            raise no_room(self.root.path, "%s are needed" % megabytes(size), free)

    def unpack(self) -> None:
        """Puts the blobs of every pack here one by one, and removes the pack."""
        for name in names(self.root.packs):
            path = os.path.join(self.root.packs, name)
            with open(path, "rb", buffering=0) as pack:
                for digest, start, size in read_index(pack.fileno()):
                    if not _has_size(self._blob_path(digest), size):
                        writer = self.writer(digest, size)
                        writer.write(os.pread(pack.fileno(), size, start))
                        writer.finish()
            _remove(path)

    def materialise(
        self, root_hash: str, dest: str, *, present: Sequence[Entry] = (), entries: Optional[Sequence[Entry]] = None
    ) -> None:
        """Writes the tree's files into the folder `dest` (made if needed), as copies of their own; not those present.
        `entries`: the tree's, when they have been loaded already.

        Each blob is hashed as it is copied: AgentError of kind need when one is missing or damaged. No link in `dest`
        is followed, and links of the tree are made last.
        """
        try:
            self._write_tree(entries or self.load_tree(root_hash), dest, set(present))
        except AgentError as error:
            if error.kind == "need":  # so that the next launch finds out what else is missing
                _remove(self._tree_path(root_hash))
            raise
        except OSError as error:
            fail(error.filename or dest, error)

    def _write_tree(self, entries: Sequence[Entry], dest: str, present: Set[Entry]) -> None:
        absent = [entry for entry in entries if entry not in present]
        make_folders(dest, absent)
        copier = _Copier()
        files = [entry for entry in absent if entry.mode != LINK]
        _in_threads(lambda entry: self._copy_blob(copier, entry, os.path.join(dest, entry.path)), files)
        for entry in absent:
            if entry.mode == LINK:
                _make_link(entry.hash, os.path.join(dest, entry.path))

    def shared(self, root_hash: str, name: str, *, file: Optional[bool] = None) -> str:
        """`data/ROOT_HASH/NAME`, the read-only copy of a tree, made once; `name` is one path component.

        file: the tree is one file of that name, and the answer is the file's path; None: when it looks like that.
        """
        path = self._shared_path(root_hash, name)
        if os.path.exists(path):
            return path
        if file is None:
            file = [e.path for e in self.load_tree(root_hash)] == [name]
        aside = self.aside("data")
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            self.materialise(root_hash, aside)
            _make_read_only(aside)
            _publish(os.path.join(aside, name) if file else aside, path)
        except OSError as error:
            fail(error.filename or path, error)
        finally:
            remove_folder(aside)
        return path

    def _shared_path(self, root_hash: str, name: str) -> str:
        if name in ("", ".", "..") or "/" in name or "\0" in name or not _HASH.match(root_hash):
            raise AgentError("usage", "not a tree and a plain name: %r, %r" % (root_hash, name))
        return os.path.join(self.root.data, root_hash, name)

    def _copy_blob(self, copier: "_Copier", entry: Entry, path: str) -> None:
        try:
            intact = self._copy_loose(copier, entry, path)
        except FileNotFoundError:
            packed = self.packs.read(entry.hash)
            if packed is not None:
                intact = content_hash(packed) == entry.hash
                write_file(path, packed, entry.mode)
            elif os.path.exists(self._blob_path(entry.hash)):  # it was unpacked just now
                intact = self._copy_loose(copier, entry, path)
            else:
                raise AgentError("need", "this host does not have the content of %s" % entry.path)
        if not intact:
            self._forget_blob(entry.hash)
            raise AgentError("need", "this host's copy of %s was damaged" % entry.path)

    def _copy_loose(self, copier: "_Copier", entry: Entry, path: str) -> bool:
        with open(self._blob_path(entry.hash), "rb", buffering=0) as source:
            return copier.copy(source, path, entry)

    def _forget_blob(self, digest: str) -> None:
        _remove(self._blob_path(digest))
        if self.packs.size(digest) is not None:
            self.packs.forget(digest)

    def _blob_path(self, digest: str) -> str:
        if not _HASH.match(digest):
            raise AgentError("usage", "not a content hash: %r" % digest)
        return os.path.join(self.root.blobs, digest[:2], digest[2:])

    def _tree_path(self, root_hash: str) -> str:
        if not _HASH.match(root_hash):
            raise AgentError("usage", "not a tree's hash: %r" % root_hash)
        return os.path.join(self.root.trees, root_hash)

    def make_tmp(self) -> str:
        """The folder for what is not finished; OSError when it cannot be made."""
        os.makedirs(self.root.tmp, mode=0o700, exist_ok=True)
        return self.root.tmp

    def aside(self, kind: str) -> str:
        """A name that no other agent uses."""
        return os.path.join(self.root.tmp, "%s-%d-%s" % (kind, os.getpid(), os.urandom(8).hex()))

    def _write_whole(self, path: str, data: bytes) -> None:
        self.make_tmp()
        temporary = self.aside("tree")
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
                f.write(data)
            os.replace(temporary, path)
        except OSError:
            _remove(temporary)
            raise


class BlobWriter:
    """Writes one blob aside; `finish` checks and publishes it."""

    def __init__(self, path: str, temporary: str, digest: str, size: int) -> None:
        self._path, self._temporary, self._expected = path, temporary, (digest, size)
        self._hash, self._size = hashlib.blake2b(digest_size=20), 0
        try:
            self._file = os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        except OSError as error:
            fail(temporary, error)

    def write(self, data: Union[bytes, memoryview]) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            self.abort()
            fail(self._temporary, error)
        self._hash.update(data)
        self._size += len(data)

    def finish(self) -> None:
        """The blob is in the store. AgentError of kind usage when the bytes are not those announced."""
        if (self._hash.hexdigest(), self._size) != self._expected:
            self.abort()
            raise not_announced(self._expected[0], self._expected[1], self._size)
        try:
            self._file.close()
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            os.replace(self._temporary, self._path)
        except OSError as error:
            self.abort()
            fail(self._path, error)

    def abort(self) -> None:
        """Forgets the bytes; harmless after anything."""
        try:
            self._file.close()
        except OSError:
            pass  # a full disk again, for what was still buffered
        _remove(self._temporary)


def not_announced(digest: str, size: int, came: int) -> AgentError:
    """The error for a blob whose bytes do not have its hash."""
    return AgentError(
        "usage",
        "%d bytes came that are not the %d bytes announced as %s" % (came, size, digest),
        "a file changed while it was being sent: deploy again",
    )


class _Copier:
    """Copies files, by reflink as long as the file system takes it."""

    def __init__(self) -> None:
        self._reflink = True

    def copy(self, source: RawIOBase, path: str, entry: Entry) -> bool:
        """Whether the copy at `path` has the entry's content."""
        digest, size = hashlib.blake2b(digest_size=20), 0
        target = _create(path, entry.mode)
        try:
            cloned = self._reflink and self._clone(source, target)
            for chunk in iter(lambda: source.read(_CHUNK), b""):
                digest.update(chunk)
                size += len(chunk)
                if not cloned:
                    _write_all(target, chunk)
        finally:
            os.close(target)
        return (digest.hexdigest(), size) == (entry.hash, entry.size)

    def _clone(self, source: RawIOBase, target: int) -> bool:
        try:
            fcntl.ioctl(target, _FICLONE, source.fileno())
        except OSError:
            self._reflink = False
        return self._reflink


def _in_threads(work: Callable[[Entry], None], entries: Sequence[Entry]) -> None:
    """Does the work for each entry, and raises the first failure. Creating files keeps a processor busy inside the
    kernel (0.7 ms each on some disks), so several threads do it."""
    failures: List[BaseException] = []
    coming = iter(entries)
    turn = threading.Lock()

    def work_on() -> None:
        while not failures:
            with turn:
                entry = next(coming, None)
            if entry is None:
                return
            try:
                work(entry)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work_on, daemon=True) for _ in range(min(THREADS, len(entries) // THREADS))]
    for thread in threads:
        thread.start()
    work_on()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def write_file(path: str, data: bytes, mode: str) -> None:
    """A tree's file with this content; a link in its place is not followed. OSError."""
    target = _create(path, mode)
    try:
        _write_all(target, data)
    finally:
        os.close(target)


def _create(path: str, mode: str) -> int:
    permissions = 0o700 if mode == EXECUTABLE else 0o600
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, permissions)


def check_tree(entries: Sequence[Entry]) -> None:
    """AgentError unless every entry is a plain relative name with a real hash, named once, and no file or link is
    another one's folder: nothing may be written through a link."""
    paths = {e.path for e in entries}
    if len(paths) != len(entries):
        raise AgentError("usage", "a tree names a path twice")
    for entry in entries:
        try:
            check_entry(entry)
        except (ValueError, TypeError, AttributeError) as error:
            raise AgentError("usage", "a tree holds an entry that is refused: %s" % error)
        if entry.mode != LINK and not _HASH.match(entry.hash):
            raise AgentError("usage", "a tree holds %r with no content hash" % entry.path)
    for folder in _folders(entries):
        if folder in paths:
            raise AgentError("usage", "a tree holds %r both as a folder and as something else" % folder)


def _folders(entries: Sequence[Entry]) -> List[str]:
    """Every folder that the entries need, parents before children."""
    folders: Set[str] = set()
    for entry in entries:
        path = entry.path
        while "/" in path:
            path = path[: path.rindex("/")]
            if path in folders:
                break
            folders.add(path)
    return sorted(folders)


def make_folders(dest: str, entries: Sequence[Entry]) -> None:
    """The folder `dest` and every folder in it that the entries need. AgentError when something else is in the way."""
    os.makedirs(dest, mode=0o700, exist_ok=True)
    for folder in _folders(entries):
        path = os.path.join(dest, folder)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise AgentError("host", "%s is in the way: it is no folder" % path)


def _make_link(target: str, path: str) -> None:
    try:
        os.symlink(target, path)
    except FileExistsError:
        os.unlink(path)
        os.symlink(target, path)


def _make_read_only(folder: str) -> None:
    for path in _walk_up(folder):
        if not os.path.islink(path):
            os.chmod(path, stat.S_IMODE(os.lstat(path).st_mode) & ~0o222)


def _walk_up(folder: str) -> Iterator[str]:
    """Everything below the folder, the deepest first; not the folder itself, whose rename needs it writable."""
    for path, folders, files in os.walk(folder, topdown=False):
        for name in folders + files:
            yield os.path.join(path, name)


def _publish(aside: str, path: str) -> None:
    """Renames a copy into place, unless another agent was first."""
    try:
        os.rename(aside, path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    else:
        if not os.path.isfile(path):
            os.chmod(path, 0o500)


def remove_folder(folder: str) -> None:
    """As much of it as can be removed, read-only folders too; of a link the link alone."""
    if os.path.islink(folder) or not os.path.isdir(folder):
        _remove(folder)
        return
    _let_in(folder)
    for path, folders, _ in os.walk(folder):
        for name in folders:
            _let_in(os.path.join(path, name))
    shutil.rmtree(folder, ignore_errors=True)


def _let_in(folder: str) -> None:
    """Lets the user list and change a folder that is theirs; what a link leads to is left as it is."""
    try:
        if not os.path.islink(folder):
            os.chmod(folder, 0o700)
    except OSError:
        pass


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _has_size(path: str, size: int) -> bool:
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _free_bytes(path: str) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def megabytes(size: int) -> str:
    return "%.1f MB" % (size / 1e6)


def no_room(path: str, why: str, free: int) -> AgentError:
    return AgentError(
        "host",
        "no room below %s: %s, %s are free" % (path, why, megabytes(free)),
        "free some space on the host, or choose another folder there with --remote-root DIR",
    )


def fail(path: str, error: OSError) -> NoReturn:
    """Raises the AgentError for what a file system refused: which path, why, how much is free, what to do."""
    folder = path
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "/"
    try:
        status = os.statvfs(folder)
        room = ", %s are free there" % megabytes(status.f_bavail * status.f_frsize)
        if status.f_files and not status.f_favail:
            room += ", but no inode"
    except OSError:
        room = ""
    raise AgentError(
        "host",
        "cannot write %s: %s%s" % (path, error.strerror or error, room),
        "free some space or the right to write there, or choose another folder with --remote-root DIR",
    )
