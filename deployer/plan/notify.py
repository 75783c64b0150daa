"""The values of --notify: URLs, to which the host posts, and commands, which run on the client that follows the job.

A URL often contains a token. So it is sent beside the plan, like secrets; the plan contains only its host name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from deployer.agent.job.plan import Plan
from deployer.errors import UsageError

VARIABLE = "TORCHFERRY_NOTIFY"
MOST, LONGEST = 8, 2000
_BARE_URL = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*(\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}(:\d+)?/\S*")


class Notify(NamedTuple):
    urls: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


def read_notify(words: Sequence[str]) -> Notify:
    """The values of the command line, or else of the environment variable, which is then removed for this client's
    programs. Raises UsageError for a value that is neither a usable URL nor a command; the message never contains a
    URL."""
    in_shell = os.environ.pop(VARIABLE, "")
    given = list(dict.fromkeys(words or ([in_shell] if in_shell else [])))
    if len(given) > MOST:
        raise UsageError(f"--notify is given {len(given)} times, and {MOST} are the most")
    urls = [word for word in given if re.match(r"\s*[A-Za-z][A-Za-z0-9+.-]*://", word)]
    for url in urls:
        _check_url(url)
    commands = [word for word in given if word not in urls]
    if any(_BARE_URL.fullmatch(word.strip()) and not os.path.exists(word) for word in commands):  # noqa: PTH110 - any text
        hint = "write https:// before it; a command of that name begins with ./"
        raise UsageError("--notify is given what looks like a URL without its https://", hint=hint)
    if not all(word.strip() and "\0" not in word for word in commands):
        raise UsageError("--notify takes a URL or a command, and this one is empty")
    return Notify(tuple(urls), tuple(commands))


def with_urls(plan: Plan, payload: dict[str, Any], urls: Sequence[str]) -> tuple[Plan, dict[str, Any]]:
    """The plan with the URLs' host names, and the payload with the URLs."""
    if not urls:
        return plan, payload
    hosts = tuple(urlsplit(url).hostname or "" for url in urls)
    return plan._replace(policy=plan.policy._replace(notify=hosts)), {**payload, "notify": list(urls)}


def _check_url(url: str) -> None:
    hint = "a URL is https://HOST/…, anything else is a command for this client's shell"
    if len(url) > LONGEST or not re.fullmatch(r"[!-~]+", url):
        what = f"is longer than {LONGEST} characters" if len(url) > LONGEST else "has spaces, or other than ASCII"
        raise UsageError(f"a URL of --notify {what}", hint=hint)
    scheme = url.partition(":")[0].lower()
    if scheme not in ("http", "https"):
        raise UsageError(f"--notify takes http and https, not {scheme}", hint=hint)
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise UsageError("a URL of --notify names no host, or no port that can be", hint=hint)
