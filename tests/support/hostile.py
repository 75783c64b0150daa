"""500 strings that have broken tools of this kind: quotes, substitutions, control characters, options, length."""

from __future__ import annotations

import random

CANARY = "torchferry-was-here"
"""Name of the file that a string creates where a shell runs it."""

_SEEDS = (
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"; touch {CANARY} #",
    f"' ; touch {CANARY} ; '",
    f'" ; touch {CANARY} ; "',
    f"\ntouch {CANARY}\n",
    f"| touch {CANARY}",
    f"|| touch {CANARY}",
    f"&& touch {CANARY} &",
    f"${{IFS}}touch{CANARY}",
    f"a'$(touch {CANARY})'b",
    f"<(touch {CANARY})",
    f"!!; touch {CANARY}",
    f"-oProxyCommand=touch {CANARY}",
    "--help",
    "-",
    "--",
    "-rf",
    "~",
    "~root",
    "$HOME",
    "${HOME}",
    "%h%p%%",
    "*",
    "?[a-z]*",
    "{a,b}",
    "a b  c",
    " leading and trailing ",
    "\ttab\t",
    "a\\nb\\",
    "back\\slash\\",
    "single ' quote",
    'double " quote',
    "'\"'\"'",
    "new\nline",
    "carriage\rreturn",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "bell\x07 backspace\x08",
    "\x7f\x80",
    "ümläut",
    "日本語",
    "🚢",
    "\u202eright-to-left",
    "e\u0301 combined",
    "\ufeffbom",
    "zero\u200bwidth",
    "a=b=c",
    "=",
    "#comment",
    "../../etc/passwd",
    "/etc/passwd",
    ".",
    "..",
    "a/../b",
    "CON",
    "nul",
    "None",
    "null",
    "true",
    "1e999",
    "[1, 2",
    "{'a': 1}",
    "!!python/object/apply:os.system ['touch " + CANARY + "']",
    "*anchor",
    "&anchor",
    "@file",
    "%s%n%x",
    "{0}{}",
    "\\x00\\u0000",
    "x" * 100_000,
    "'" * 3000,
    "\n" * 500,
)


def hostile_strings(count: int = 500, *, seed: int = 0) -> list[str]:
    """The same list every time: the seeds above, then joins and cuts of them. None is empty, none has a NUL."""
    source = random.Random(seed)
    found = dict.fromkeys(_SEEDS)
    short = [text for text in _SEEDS if len(text) < 200]
    while len(found) < count:
        parts = source.sample(short, source.randint(2, 4))
        text = source.choice(("", " ", "'", "\n", "/")).join(part[source.randint(0, 3) :] for part in parts)
        if text.strip():
            found[text] = None
    return list(found)[:count]
