"""The first Python that runs on the host: finds the agent under its hash, or takes it from the client, and enters it.

Its source travels inside the command's one base64 word together with `P`, the client's first message; it must stay
small and cannot import the package that it is there to find.
"""

import errno
import io
import json
import os
import re
import shutil
import struct
import sys
import threading
import zlib
from importlib import import_module
from typing import Any, BinaryIO, Dict, List


def load(P: Dict[str, Any]) -> None:
    root = os.path.abspath(os.path.expanduser(P["root"]))
    home = os.path.join(root, "agent", P["agent"])
    stdin = io.BufferedReader(io.FileIO(0, closefd=False), 1 << 16)
    os.umask(0o077)
    try:
        check_owners(root)
        if not os.path.exists(os.path.join(home, "agent", "serve.py")):
            say(P, {"need": "agent"})
            P["nonce"] = ""  # said once
            install(home, receive(stdin))
    except OSError as e:
        text = "%s: %s" % (e.filename or root, e.strerror)
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        say(
            P,
            {
                "refused": {
                    "kind": "host",
                    "message": "the remote root cannot be used: " + text,
                    "hint": ("free some space there, or " if full else "") + "choose another folder with --remote-root",
                }
            },
        )
        return
    sys.path.insert(0, home)
    disk = os.statvfs(root)
    sys.dont_write_bytecode = disk.f_bavail * disk.f_frsize < 64 << 20  # see serve.py
    import_module("agent.serve").main(P, stdin)


def check_owners(root: str) -> None:
    # what lies there is executed and written to: another user may have put it where it was expected
    ours = (0, os.getuid())
    for name in (".", "agent", "jobs", "store", "data", "envs", "tmp", "cache"):
        path = os.path.normpath(os.path.join(root, name))
        if os.path.lexists(path):
            foreign = [uid for uid in (os.lstat(path).st_uid, os.stat(path).st_uid) if uid not in ours]
            shared = os.stat(os.path.dirname(path)).st_mode & 0o002
            if foreign and (shared or os.getuid() != 0):  # root in a container may well use a mounted folder
                raise OSError(0, "it belongs to another user (uid %d)" % foreign[0], path)


def say(P: Dict[str, Any], head: Dict[str, Any]) -> None:
    text = json.dumps(head).encode()
    os.write(1, P["nonce"].encode() + struct.pack(">II", len(text), 0) + text)


def receive(stdin: BinaryIO) -> Dict[str, str]:
    # what the client had sent for an agent that was not there is not for us: only frames marked `agent` are
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


def sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:  # some network file systems sync no folders
        pass
    os.close(fd)


def install(home: str, files: Dict[str, str]) -> None:
    for name in files:
        if not re.fullmatch(r"(\w+/)*\w+\.py", name, re.ASCII):  # nothing outside the agent's folder
            raise OSError(errno.EINVAL, "not a module's path", name)
    tmp = "%s.%d" % (home, os.getpid())
    failures: List[OSError] = []

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

    # all at once: the disk syncs sixty files together as fast as five one by one
    threads = [threading.Thread(target=write, args=item) for item in files.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        shutil.rmtree(tmp, ignore_errors=True)  # a full disk needs the room
        raise failures[0]
    for folder, _, _ in os.walk(tmp):
        sync(folder)
    try:
        os.rename(tmp, home)
    except OSError as e:
        shutil.rmtree(tmp, ignore_errors=True)
        if not os.path.exists(os.path.join(home, "agent", "serve.py")):  # else another client was first
            raise OSError(e.errno, e.strerror, home)
