"""Hosts that speak our protocol and lie, for tests: what they do is a few lines of Python with the words of PRELUDE."""

from __future__ import annotations

import shlex
from pathlib import Path

from deployer.connection.host import Host
from deployer.transport.local import LocalTransport

PRELUDE = """
import base64, hashlib, json, re, struct, sys, time, zlib
nan, out = float("nan"), sys.stdout.buffer
source = zlib.decompress(base64.b64decode(WORD)).decode()
nonce = re.search('nonce.: .([0-9a-f]+)', source).group(1).encode()
op = (re.findall('"op": "([a-z_]+)"', source.replace(chr(92), "")) or [""])[0]
def frame(head, body=b""):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    out.write(struct.pack(">II", len(text), len(body)) + text + body)
    out.flush()
def event(name, value, id=0):
    frame({"id": id, "event": name, "value": value})
def many(data, name="jobs", id=0):
    for start in range(0, len(data), 48000):
        frame({"id": id, "json": True}, data[start : start + 48000])
    frame({"id": id, "event": name})
def hear(op=None):
    while True:
        n, m = struct.unpack(">II", sys.stdin.buffer.read(8))
        head = json.loads(sys.stdin.buffer.read(n))
        sys.stdin.buffer.read(m)
        if op is None or head.get("op") == op:
            return head
def file_row(row):
    names = ("path", "size", "mtime_ns", "inode", "stored")
    if not isinstance(row, list) or len(row) != len(names):
        return row
    return {**dict(zip(names, row)), "inode": str(row[3])}
def files(*rows):
    event("files", [file_row(row) for row in rows])
    frame({"id": 0, "ok": {}})
    frame({"hello": {}})
def forever():
    for _ in range(60):  # longer than any client waits, and not for ever: sshd leaves it behind
        time.sleep(1)
"""


class Lying(LocalTransport):
    """A host that answers with the nonce and then does what `code` says, with the words of PRELUDE."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    def open(self, command):
        word = command.rsplit(" ", 1)[1]
        program = f"WORD = {word!r}\n{PRELUDE}out.write(nonce)\n{self.code}\nout.flush()\n"
        return super().open(f"python3 -c {shlex.quote(program)}")


def lying_host(code: str, folder: Path) -> Host:
    return Host(None, str(folder), begun=Lying(code))
