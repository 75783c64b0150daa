"""The first Python code that runs on the host: finds the agent under its hash, or receives it from the client, and
starts it.

Its source is sent after those of `guard.py` and `bytecode.py` in the command's single base64 word, together with `P`,
the client's first message. It must stay small and cannot import the package that it has to find.
"""

import errno
import fcntl
import io
import json
import os
import re
import stat
import struct
import sys
import threading
import zlib
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, Dict, List

if TYPE_CHECKING:
    from hashlib import blake2b as blake2b

    from .bytecode import enter
    from .guard import TRUSTED, Refused, correct_home, find_root, secure_root
else:
    try:
        from _blake2 import blake2b  # hashlib loads OpenSSL beside it
    except ImportError:
        from hashlib import blake2b


def load(P: Dict[str, Any]) -> None:
    mode = os.fstat(1).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(1)):
        os._exit(99)  # a login has led stdout elsewhere: nobody would hear of what is started
    root = P["root"]
    stdin = io.BufferedReader(io.FileIO(0, closefd=False), 1 << 16)
    os.umask(0o077)
    correct_home(must_be_ours=True)
    try:
        root = find_root(root)
        home = os.path.join(root, "agent", P["agent"])
        secure_root(root)
        if not is_intact(home):
            say(P, {"need": "agent"})
            P["nonce"] = ""  # said once
            install(home, receive(stdin))
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = ("free some space there, or " if full else "") + "choose another folder with --remote-root"
        if isinstance(e, Refused):
            hint = "%s%s; or, if you trust all who can write there, name it in %s on the host" % (e.hint, hint, TRUSTED)
        text = "the remote root cannot be used: %s: %s" % (e.filename or root, e.strerror)
        say(P, {"refused": {"kind": "host", "message": text, "hint": hint}})
        return
    enter(home)
    disk = os.statvfs(root)
    sys.dont_write_bytecode = disk.f_bavail * disk.f_frsize < 64 << 20  # see serve.py
    import_module("agent.serve").main(P, stdin)


def say(P: Dict[str, Any], head: Dict[str, Any]) -> None:
    text = json.dumps(head).encode()
    os.write(1, P["nonce"].encode() + struct.pack(">II", len(text), 0) + text)


def receive(stdin: BinaryIO) -> Dict[str, str]:
    # frames that the client sent before it knew that the agent is missing are ignored: only those marked `agent` are
    # read
    parts = []
    while True:
        sizes = stdin.read(8)
        if len(sizes) < 8:
            sys.exit(0)
        n, m = struct.unpack(">II", sizes)
        head, body = json.loads(stdin.read(n)), stdin.read(m)
        if "agent" in head:
            parts.append(body)
            if head["agent"] == "end":
                return dict(json.loads(zlib.decompress(b"".join(parts))))


def name_of(sources: Dict[str, bytes]) -> str:
    """An agent's name: a hash of the paths and sources of all its modules."""
    h = blake2b(digest_size=10)
    for path in sorted(sources):
        h.update(b"%s\0%d\0" % (path.encode(), len(sources[path])) + sources[path])
    return h.hexdigest()


def is_intact(home: str) -> bool:
    """Whether an installed agent is undamaged: a power cut or a full disk may have damaged it."""
    sources, folders = {}, [""]
    try:
        for below in folders:
            for entry in os.scandir(os.path.join(home, "agent", below)):
                if entry.name.endswith(".py"):
                    fd = os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK)
                    sources[below + entry.name] = os.read(fd, 1 << 20)
                    os.close(fd)
                elif entry.name != "__pycache__" and entry.is_dir(follow_symlinks=False):
                    folders.append(below + entry.name + "/")
    except OSError:
        return False
    return name_of(sources) == os.path.basename(home)


def sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:  # some network file systems sync no folders
        pass
    os.close(fd)


def install(home: str, files: Dict[str, str]) -> None:
    import shutil  # brings seven modules along, for what is seldom done

    for name in files:
        if not re.fullmatch(r"(\w+/)*\w+\.py", name, re.ASCII):  # nothing outside the agent's folder
            raise OSError(errno.EINVAL, "not a module's path", name)
    tmp, spoilt = ("%s.%d.%s" % (home, os.getpid(), what) for what in ("new", "old"))
    failures: List[OSError] = []
    lock = -1

    def write(name: str, source: str) -> None:
        path = os.path.join(tmp, "agent", name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as f:
                f.write(source)
                f.flush()
                os.fsync(f.fileno())  # a power cut must not leave an agent of empty files
        except OSError as e:
            failures.append(e)

    # all at the same time: the disk syncs sixty files together as fast as five one by one
    threads = [threading.Thread(target=write, args=item) for item in files.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        if failures:
            raise failures[0]  # a full disk needs the room: see below
        for folder, _, _ in os.walk(tmp):
            sync(folder)
        lock = os.open(os.path.dirname(home), os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # nobody takes away what another client has just put there
        except OSError:  # a file system without locks
            pass
        if not is_intact(home):  # else another client was first
            if os.path.lexists(home):
                os.rename(home, spoilt)
            os.rename(tmp, home)
    except OSError:
        if failures or not is_intact(home):
            raise
    finally:
        if lock >= 0:
            os.close(lock)
        for path in (tmp, spoilt):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            elif os.path.lexists(path):
                os.unlink(path)
