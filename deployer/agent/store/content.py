"""The content-addressed store on a host: blobs by hash, trees by root hash, and copies of trees for jobs.

Everything appears by a rename, so that several agents may work at once and a reader sees all of it or nothing. Blobs
are not fsynced one by one (a thousand would take seconds); a blob that a power cut damaged is noticed when it is
copied. It is then removed together with its tree, and the next launch requests it again.

Stdlib only, Python 3.8: this package runs on the host.
"""

import errno
import os
import re
import stat
from contextlib import suppress
from typing import List, Optional, Sequence, Set

from ..host.disk import fail, free_bytes, megabytes, no_room
from ..host.errors import AgentError
from ..host.files import open_regular, read_whole, remove, remove_folder, write_whole
from ..host.layout import Root
from ..host.typed import InvalidData, parse
from .blob import BlobWriter
from .packs import Packs, names, read_index
from .tree import LINK, MAX_BYTES, Entry, check_entry, content_hash, dump_entries, folders_of
from .tree_files import Copier, in_threads, make_folders, make_link, make_read_only, write_file

_HASH = re.compile(r"[0-9a-f]{40}\Z")
SYNCED_APART = 2000
"""Maximum number of files that are synced one by one: some seconds on a slow disk."""


class Store:
    """Blobs and trees below a root. Raises AgentError of kind `host` if the disk refuses, and of kind `need` if the
    client must send files."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.packs = Packs(root)

    def has_tree(self, root_hash: str) -> bool:
        return os.path.isfile(self._tree_path(root_hash))

    def save_tree(self, entries: Sequence[Entry]) -> str:
        """Stores a tree and returns its root hash. Raises AgentError if an entry could lead out of the tree."""
        check_tree(entries)
        data = dump_entries(sorted(entries))
        root_hash = content_hash(data)
        path = self._tree_path(root_hash)
        if not os.path.isfile(path):
            try:
                self.make_tmp()
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                write_whole(path, data, sync=True, aside=self.aside("tree"))  # by it a copy is mended
            except OSError as error:
                fail(path, error)
        return root_hash

    def load_tree(self, root_hash: str) -> List[Entry]:
        """The entries of a tree. Raises AgentError of kind `need` if it is missing or damaged."""
        path = self._tree_path(root_hash)
        try:
            entries = _read_tree(path, root_hash)
        except FileNotFoundError:
            raise AgentError("need", "this host does not have the tree %s" % root_hash)
        except (OSError, InvalidData):
            remove_folder(path)  # whatever lies there
            raise AgentError("need", "this host's copy of the tree %s was damaged" % root_hash)
        check_tree(entries)
        return entries

    def keep_listing(self, root_hash: str, path: str) -> None:
        """Links the tree's file to `path`, beside a job's copy, so that `mend` works after the store has lost the tree.
        Copies it if the link fails (another disk)."""
        source = self._tree_path(root_hash)
        remove(path)
        try:
            os.link(source, path)
        except OSError:  # on another disk, say
            with suppress(OSError):
                write_whole(path, read_whole(source, MAX_BYTES + 1), sync=True)

    def missing(self, entries: Sequence[Entry]) -> List[str]:
        """Hashes of the blobs that are missing (or have the wrong size), each once, in the entries' order."""
        wanted = {e.hash: e.size for e in entries if e.mode != LINK}
        return [digest for digest, size in wanted.items() if not self._has_blob(digest, size)]

    def _has_blob(self, digest: str, size: int) -> bool:
        return _has_size(self._blob_path(digest), size) or self.packs.size(digest) == size

    def writer(self, digest: str, size: int) -> "BlobWriter":
        """A writer for one blob. Raises AgentError if the file system has not enough space for it."""
        path = self._blob_path(digest)
        self.check_room(size)
        return BlobWriter(path, self.aside("blob"), digest, size)

    def check_room(self, size: int) -> None:
        """Raises AgentError if the file system has fewer bytes free, or cannot be written."""
        try:
            free = free_bytes(self.make_tmp())
        except OSError as error:
            fail(self.root.tmp, error)
        if size > free:
            raise no_room(self.root.path, "%s are needed" % megabytes(size), free)

    def unpack(self) -> None:
        """Writes the blobs of every pack as single files, and removes the packs."""
        for name in names(self.root.packs):
            path = os.path.join(self.root.packs, name)
            with open_regular(path) as pack:
                for digest, start, size in read_index(pack.fileno()):
                    if not _has_size(self._blob_path(digest), size):
                        writer = self.writer(digest, size)
                        writer.write(os.pread(pack.fileno(), size, start))
                        writer.finish()
            remove(path)

    def materialise(
        self, root_hash: str, dest: str, *, present: Sequence[Entry] = (), entries: Optional[Sequence[Entry]] = None
    ) -> None:
        """Writes the tree's files, except those in `present`, into the folder `dest` (created if needed) as separate
        copies. `entries`: the tree's entries, if they are already loaded.

        Each blob is hashed while it is copied. Raises AgentError of kind `need` if one is missing or damaged. Follows
        no link in `dest`; the tree's links are created last.
        """
        try:
            self._write_tree(entries or self.load_tree(root_hash), dest, set(present))
        except AgentError as error:
            if error.kind == "need":  # so that the next launch finds out what else is missing
                remove(self._tree_path(root_hash))
            raise
        except OSError as error:
            fail(error.filename or dest, error)

    def _write_tree(self, entries: Sequence[Entry], dest: str, present: Set[Entry]) -> None:
        absent = [entry for entry in entries if entry not in present]
        make_folders(dest, absent)
        copier = Copier()
        files = [entry for entry in absent if entry.mode != LINK]
        in_threads(lambda entry: self._copy_blob(copier, entry, os.path.join(dest, entry.path)), files)
        for entry in absent:
            if entry.mode == LINK:
                make_link(entry.hash, os.path.join(dest, entry.path))

    def mend(self, root_hash: str, dest: str, listing: str = "") -> None:
        """Restores files of a tree's copy that a power cut damaged: missing ones, and ones that hold the start of their
        content followed by zeros. Any other difference is a change by the job or a user and stays. Files behind a link
        do not belong to the job. Raises like materialise, but keeps the tree in the store, so it raises each time until
        all files can be restored. `listing`: the tree's file beside the copy."""
        entries = self._find_tree(root_hash, listing)
        others = tuple(folder + "/" for folder in folders_of(entries) if _is_replaced(os.path.join(dest, folder)))
        ours = [entry for entry in entries if not entry.path.startswith(others)]
        cut = {entry for entry in ours if self._is_cut(entry, os.path.join(dest, entry.path))}
        for entry in cut:
            remove(os.path.join(dest, entry.path))
        try:
            self._write_tree([entry for entry in entries if entry in cut], dest, set())
        except OSError as error:
            fail(error.filename or dest, error)

    def _find_tree(self, root_hash: str, listing: str) -> List[Entry]:
        """The tree's entries from the store, or from the file beside the copy. Removes nothing, so a second call gives
        the same result."""
        for path in filter(None, (self._tree_path(root_hash), listing)):
            try:
                entries = _read_tree(path, root_hash)
            except (OSError, InvalidData):
                continue
            check_tree(entries)
            return entries
        raise AgentError("need", "this host has no whole listing of the tree %s" % root_hash)

    def _is_cut(self, entry: Entry, path: str) -> bool:
        if entry.mode == LINK or os.path.islink(path):
            return not os.path.lexists(path)
        try:
            found = read_whole(path, entry.size + 1)
        except OSError:
            return not os.path.lexists(path)
        if len(found) > entry.size or content_hash(found) == entry.hash:
            return False
        whole = self.packs.read(entry.hash)
        try:
            whole = read_whole(self._blob_path(entry.hash), entry.size) if whole is None else whole
        except OSError:
            whole = b""
        if content_hash(whole) != entry.hash:
            raise AgentError("need", "this host's copy of %s was damaged" % entry.path)
        return whole.startswith(found.rstrip(b"\0"))

    def shared(self, root_hash: str, name: str, *, file: Optional[bool] = None) -> str:
        """`data/ROOT_HASH/NAME`, the read-only copy of a tree, made once; `name` is one path component.

        `file`: the tree is one file of this name, and the result is the file's path; None: decided by the tree's
        entries.
        """
        path = self._shared_path(root_hash, name)
        if os.path.lexists(path):
            if self._is_whole(path, root_hash):
                return path
            self._remove_shared(path)
        entries = self.load_tree(root_hash)
        if file is None:
            file = [e.path for e in entries] == [name]
        aside = self.aside("data")
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            self.materialise(root_hash, aside, entries=entries)
            make_read_only(aside)
            _sync(entries, aside)  # nobody compares their content again, also after a power cut
            _publish(os.path.join(aside, name) if file else aside, path)
        except OSError as error:
            fail(error.filename or path, error)
        finally:
            remove_folder(aside)
        return path

    def _is_whole(self, path: str, root_hash: str) -> bool:
        """Whether a copy has all its files with their sizes."""

        def look(entry: Entry) -> None:
            found = os.lstat(os.path.join(path, entry.path) if is_folder else path)
            if entry.mode != LINK and (not stat.S_ISREG(found.st_mode) or found.st_size != entry.size):
                raise OSError(errno.EIO, "not what was written")

        entries, is_folder = self.load_tree(root_hash), os.path.isdir(path)
        if not is_folder and len(entries) != 1:
            return False
        try:
            in_threads(look, entries)
        except OSError:
            return False
        return True

    def _remove_shared(self, path: str) -> None:
        """Removes a damaged copy. A job that uses it keeps its open files."""
        aside = self.aside("data")
        try:
            self.make_tmp()
            if os.path.isdir(path):
                os.chmod(path, 0o700)  # a folder that is moved elsewhere must be writable
            os.rename(path, aside)
        except OSError as error:
            fail(path, error)
        remove_folder(aside)

    def _shared_path(self, root_hash: str, name: str) -> str:
        if name in ("", ".", "..") or "/" in name or "\0" in name or not _HASH.match(root_hash):
            raise AgentError("usage", "not a tree and a plain name: %r, %r" % (root_hash, name))
        return os.path.join(self.root.data, root_hash, name)

    def _copy_blob(self, copier: Copier, entry: Entry, path: str) -> None:
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

    def _copy_loose(self, copier: Copier, entry: Entry, path: str) -> bool:
        with open_regular(self._blob_path(entry.hash)) as source:
            return copier.copy(source, path, entry)

    def _forget_blob(self, digest: str) -> None:
        remove(self._blob_path(digest))
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
        """Creates the folder for temporary files. Raises OSError if that fails."""
        os.makedirs(self.root.tmp, mode=0o700, exist_ok=True)
        return self.root.tmp

    def aside(self, kind: str) -> str:
        """A temporary path that no other agent uses."""
        return os.path.join(self.root.tmp, "%s-%d-%s" % (kind, os.getpid(), os.urandom(8).hex()))


def _read_tree(path: str, root_hash: str) -> List[Entry]:
    """Reads a tree's file. Raises OSError if it cannot be read, and InvalidData if its hash is wrong."""
    data = read_whole(path, MAX_BYTES + 1)
    if content_hash(data) != root_hash:
        raise InvalidData("its hash is another")
    return parse(data, List[Entry], most=MAX_BYTES)


def check_tree(entries: Sequence[Entry]) -> None:
    """Raises AgentError unless every entry is a plain relative name with a valid hash and occurs once, and no file or
    link is also another entry's folder: nothing may be written through a link."""
    paths = {e.path for e in entries}
    if len(paths) != len(entries):
        raise AgentError("usage", "a tree names a path twice")
    for entry in entries:
        try:
            check_entry(entry)
        except InvalidData as damage:
            raise AgentError("usage", "a tree holds an entry that is refused: %s" % damage)
        if entry.mode != LINK and not _HASH.match(entry.hash):
            raise AgentError("usage", "a tree holds %r with no content hash" % entry.path)
    for folder in folders_of(entries):
        if folder in paths:
            raise AgentError("usage", "a tree holds %r both as a folder and as something else" % folder)


def _is_replaced(folder: str) -> bool:
    """Whether something that is not a folder is in the folder's place."""
    return os.path.lexists(folder) and not stat.S_ISDIR(os.lstat(folder).st_mode)


def _has_size(path: str, size: int) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return found.st_size == size and stat.S_ISREG(found.st_mode)


def _sync(entries: Sequence[Entry], folder: str) -> None:
    """Makes the content of a tree's copy durable. A few files are synced one by one, because a sync of everything on
    the host may take minutes; many files would take longer than that."""

    def sync(entry: Entry) -> None:
        with open_regular(os.path.join(folder, entry.path)) as file:
            os.fsync(file.fileno())

    files = [entry for entry in entries if entry.mode != LINK]
    if len(files) > SYNCED_APART:
        os.sync()
    else:
        in_threads(sync, files)


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
