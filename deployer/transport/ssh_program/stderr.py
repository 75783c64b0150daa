"""What the ssh program says on its stderr at LogLevel DEBUG1, kept apart from what else comes on the same pipe."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

MAX_LINE = 8192
_READY = r"debug1: (Entering interactive session|mux_client_request_session: master session id)"
_HOST_KEY = r"debug1: Server host key: (\S+ SHA256:\S+)"
_OFFERED = r"debug1: Offering (?:\S+ )?public key: (.+?)(?: SHA256:\S+)?( \S+)?$"
_METHODS = r"debug1: Authentications that can continue: (.*)"
_INSTEAD = r"debug1: (?:kex|ssh)_exchange_identification: (?:banner line \d+: )?(.*)"
_NO_NEWS = r"debug\d: |Authenticated to .+ (\(\[|\(via proxy\))|Transferred: sent \d+|Bytes per second: sent [\d.]+"


class SshWords:
    """Hears one ssh process; `sift` is for a Drain. `settled` is set once the process is logged in, or has ended."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self.settled = threading.Event()
        self.ended = threading.Event()
        self.ready = False
        """Logged in."""
        self.connected = False
        """The TCP connection was there."""
        self.greeted = False
        """The server itself has answered, not only a hop before it."""
        self.instead = ""
        """What the server said in the place of SSH's first line."""
        self.host_key = ""
        """Type and fingerprint of the key that the server showed."""
        self.offered: list[str] = []
        self.accepted = ""
        """The last key that the server would take."""
        self.methods: list[str] = []
        self._show = show
        self._rest = b""

    def sift(self, data: bytes) -> bytes:
        """Takes what came, b"" at the end; returns what is not of ssh's own debugging."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        kept = b"".join(line + b"\n" for line in lines if self._is_news(line))
        if not data or len(self._rest) > MAX_LINE:
            last, self._rest = self._rest, b""
            kept += last if last and self._is_news(last) else b""
        if not data:
            self.ended.set()
            self.settled.set()
        return kept

    def _is_news(self, line: bytes) -> bool:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if not re.match(_NO_NEWS, text):
            if self._show is not None and not self.ready:
                self._show(text)
            return True
        if not self.ready:
            self._hear(text)
        return False

    def _hear(self, text: str) -> None:
        if found := re.match(_HOST_KEY, text):
            self.host_key = found[1]
        elif found := re.match(_OFFERED, text):
            self.offered.append(found[1])
        elif found := re.match(_METHODS, text):
            self.methods = found[1].split(",")
        elif text.startswith("debug1: Server accepts key: "):
            self.accepted = self.offered[-1] if self.offered else ""
        elif found := re.match(_INSTEAD, text):
            self.instead = self.instead or found[1]
        elif text == "debug1: Connection established.":
            self.connected = True
        elif text.startswith("debug1: Authenticating to "):
            self.greeted = True
        elif re.match(_READY, text):
            self.ready = True
            self.settled.set()
