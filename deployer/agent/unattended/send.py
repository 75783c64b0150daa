"""The process that posts one event to a URL; both arrive on stdin. It prints a line about a failure, and never the URL,
which is a secret.

Stdlib only, Python 3.8.
"""

import base64
import json
import signal
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Dict, NamedTuple, Tuple

from ..host.typed import parse

TRY_S, WAITS_S = 5.0, (1.0, 3.0)
"""Seconds for one try, and the pauses before further ones."""
ALL_S = 30
"""Seconds after which the process ends, whatever a server does."""


class Letter(NamedTuple):
    url: str
    body: Dict[str, Any]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the event, and a secret in its URL, is for one host."""

    def redirect_request(self, *args: Any, **more: Any) -> None:
        return None


def main() -> None:
    signal.alarm(ALL_S)
    letter = parse(sys.stdin.buffer.read(), Letter)
    trouble = post(letter.url, letter.body)
    if trouble:
        host = urllib.parse.urlsplit(letter.url).hostname or "?"
        sys.stderr.write("notify: %s was not told of %s: %s\n" % (host, letter.body.get("event"), trouble))


def post(url: str, body: Dict[str, Any]) -> str:
    """Why the event could not be sent; empty if the server has accepted it."""
    trouble = ""
    for wait_s in (*WAITS_S, None):
        trouble, again = _post_once(url, body)
        if not again or wait_s is None:
            break
        time.sleep(wait_s)
    return trouble


def _post_once(url: str, body: Dict[str, Any]) -> Tuple[str, bool]:
    """(error text, whether another try may help). Of a server's answer only the status is read."""
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        opener.open(request_of(url, body), timeout=TRY_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        redirect = ", a redirect, which is not followed" if 300 <= error.code < 400 else ""
        return "it answered %d%s" % (error.code, redirect), error.code >= 500 or error.code == 429
    except Exception as error:
        return _words(error), True
    return "", False


def request_of(url: str, body: Dict[str, Any]) -> urllib.request.Request:
    """The HTTP request: plain text for ntfy, JSON for others. A user and password in the URL become a
    basic-authentication header."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError
    user, _, place = parts.netloc.rpartition("@")
    is_ntfy = (parts.hostname or "").split(".")[0] == "ntfy"
    data = str(body.get("text", "")).encode("utf-8") if is_ntfy else json.dumps(body).encode("ascii")
    headers = {"Content-Type": "text/plain; charset=utf-8" if is_ntfy else "application/json"}
    headers["User-Agent"] = "torchferry"
    if user:
        word = urllib.parse.unquote(user).encode("utf-8")
        headers["Authorization"] = "Basic " + base64.b64encode(word).decode("ascii")
    plain = urllib.parse.urlunsplit((parts.scheme, place, parts.path or "/", parts.query, ""))
    return urllib.request.Request(plain, data, headers, method="POST")


def _words(error: BaseException) -> str:
    """An error as text without its own message, which may contain the URL."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, socket.timeout):
        return "no answer within %g s" % TRY_S
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__
