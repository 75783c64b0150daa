"""Messages of servers and login shells that refuse a login or run no command: what each means, and what to do about
it."""

from __future__ import annotations

import re
from typing import NamedTuple


class Cause(NamedTuple):
    """A pattern over a host's output, with its meaning; the hint may contain its first group as `{}`."""

    words: str
    message: str
    hint: str


ACCOUNT = (
    Cause(
        r"(?i)login as the user [\"']([^\"']+)[\"']",
        "the host wants another user",
        "use --ssh {}@…",
    ),
    Cause(
        r"(?i)password (has |is )?expired|required to change your password|password change required",
        "the account's password on the host has expired",
        "log in once with `ssh` and change it",
    ),
    Cause(
        r"(?i)account is (currently )?not available|/nologin|/bin/false|logins? (is|are) (currently )?disabled"
        r"|account (has|is) (been )?(disabled|expired|locked)|system is (going down|booting up)",
        "the account on the host may not log in (disabled, or its shell is nologin)",
        "use another user, or have the account enabled",
    ),
)
"""Messages that may appear before or after a login, with the same meaning."""

NO_EXEC = Cause(
    r"(?i)(doesn't|does not) support PTY|requires? a (pty|tty|terminal)|not a tty|interactive (session|shell) only"
    r"|exec(ution)? (request )?(is )?not (supported|allowed|permitted)|command execution is (disabled|not)"
    r"|exec request failed|does not provide shell access|only sftp|This service allows sftp connections only",
    "this SSH endpoint runs no commands, it only opens interactive terminals or transfers files",
    "if it is a relay, use the machine's direct SSH address (root@IP:PORT, 'SSH over exposed TCP') instead",
)

LOGIN = (
    *ACCOUNT,
    NO_EXEC,
    Cause(
        r"(?i)quota exceeded|no space left on device",
        "the host's login failed for want of disk space",
        "free some space in the account's home folder on the host",
    ),
    Cause(
        r"/bin/sh(: | not |'?: )*(No such file|not found)",
        "the host has no /bin/sh",
        "is its root folder a bare one (ChrootDirectory)?",
    ),
)
"""Messages of a login that ended before our command started."""

CROWDED = r"(?i)MaxStartups|Not allowed at this time"
"""Sent in place of SSH's first line by a server that has too many connections, or too many failures of ours."""

KEYS = "check the user (root? ubuntu?), and that its ~/.ssh/authorized_keys has this key; --ssh-key FILE offers another"
MORE_KEYS = "offer the right key alone: --ssh-key FILE, or in ssh_config IdentityFile with IdentitiesOnly yes"
TOO_MANY_KEYS = r"(?i)too many authentication failures"


def cause_of(said: str, causes: tuple[Cause, ...]) -> tuple[str, str] | None:
    """Message and hint of the first cause that matches a host's output; None if none does."""
    for cause in causes:
        if found := re.search(cause.words, said):
            return cause.message, cause.hint.format(found[1] if "{}" in cause.hint else "")
    return None
