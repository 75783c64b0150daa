"""Implements git's ignore rules exactly: patterns as regular expressions, and which rule decides about a path.

A translation of git's wildmatch.c and dir.c, byte for byte, for two reasons. Leaving out whole folders during the walk
needs "does this very path match", and libraries answer "does this path or a parent match". And the report names the
rule and its file. The tests compare it with `git check-ignore`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_CLASSES = {
    b"alnum": rb"[A-Za-z0-9]",
    b"alpha": rb"[A-Za-z]",
    b"blank": rb"[ \t]",
    b"cntrl": rb"[\x00-\x1f\x7f]",
    b"digit": rb"[0-9]",
    b"graph": rb"[\x21-\x7e]",
    b"lower": rb"[a-z]",
    b"print": rb"[\x20-\x7e]",
    b"punct": rb"[!-/:-@\[-`{-~]",
    b"space": rb"[ \t\n\r\v\f]",
    b"upper": rb"[A-Z]",
    b"xdigit": rb"[0-9A-Fa-f]",
}
_SPECIAL = re.compile(rb"[*?\[\\]")
_NEVER = rb"(?!)"


@dataclass(frozen=True)
class Rule:
    """One line of an ignore file."""

    pattern: str  # as written
    source: str  # file and line, for the reader
    regex: bytes  # full match on the name (by_name) or on the path below the file's folder
    by_name: bool
    dir_only: bool
    negated: bool


class RuleFile:
    """The rules of one ignore file, for paths relative to the walk's root. `prefix`: put before the path, for an ignore
    file above the root. `skip`: bytes to remove from the path, for one below it. `source`: the file's name in reports.
    `ignore_case`: git's core.ignoreCase, which matches the path in lower case (ASCII only, as git does)."""

    def __init__(
        self, text: bytes, source: str, *, prefix: bytes = b"", skip: int = 0, ignore_case: bool = False
    ) -> None:
        rules = reversed(parse_rules(text, source, fold=ignore_case))
        self.rules = [(rule, re.compile(rule.regex, re.DOTALL)) for rule in rules]
        self._prefix = prefix
        self._skip = skip
        self._fold = ignore_case
        # most paths match nothing: two alternations find that out without trying every rule
        self._any_name = _alternation(r.regex for r, _ in self.rules if r.by_name)
        self._any_path = _alternation(r.regex for r, _ in self.rules if not r.by_name)

    def decide(self, path: bytes, is_dir: bool) -> Rule | None:
        """The last rule that matches this very path, without its parents; None if no rule does."""
        name = path[path.rfind(b"/") + 1 :]
        local = self._prefix + path[self._skip :]
        if self._fold:
            name, local = name.lower(), local.lower()
        if not self._any_name.fullmatch(name) and not self._any_path.fullmatch(local):
            return None
        for rule, compiled in self.rules:
            if rule.dir_only and not is_dir:
                continue
            if compiled.fullmatch(name if rule.by_name else local):
                return rule
        return None


def decide(files: Sequence[RuleFile], path: bytes, is_dir: bool) -> Rule | None:
    """The rule that decides about a path: from the last (strongest) file that has a match."""
    for file in reversed(files):
        rule = file.decide(path, is_dir)
        if rule is not None:
            return rule
    return None


def parse_rules(text: bytes, source: str, *, fold: bool = False) -> list[Rule]:
    """The rules of an ignore file's text; `fold`: for paths in lower case; `source`: the file's name in reports."""
    if text.startswith(b"\xef\xbb\xbf"):
        text = text[3:]
    rules = (_parse_line(line, f"{source}:{number}", fold=fold) for number, line in enumerate(text.split(b"\n"), 1))
    return [rule for rule in rules if rule is not None]


def _parse_line(line: bytes, source: str, *, fold: bool) -> Rule | None:
    line = _trim_spaces(line[:-1] if line.endswith(b"\r") else line)
    if not line or line.startswith(b"#"):
        return None
    negated = line.startswith(b"!")
    body = line[1:] if negated else line
    dir_only = body.endswith(b"/")
    body = body[:-1] if dir_only else body
    by_name = b"/" not in body
    regex = translate(body, by_name=by_name, fold=fold)
    if not body or regex is None:
        return None
    return Rule(line.decode("utf-8", "surrogateescape"), source, regex, by_name, dir_only, negated)


def _trim_spaces(line: bytes) -> bytes:
    kept = line.rstrip(b" ")
    backslashes = len(kept) - len(kept.rstrip(b"\\"))
    return kept + b" " if backslashes % 2 and len(kept) < len(line) else kept


def translate(pattern: bytes, *, by_name: bool, fold: bool = False) -> bytes | None:
    """The regular expression (for fullmatch) of a pattern without `!` and a final `/`; None if nothing can match it.
    `fold`: for a path in lower case. As in git, a letter after a backslash or alone in a class is not folded."""
    if not by_name and pattern.startswith(b"/"):
        pattern = pattern[1:]
    special = _SPECIAL.search(pattern)
    literal = special.start() if special else len(pattern)
    start = pattern[:literal]
    parts, i = [re.escape(start.lower() if fold else start)], literal
    while i < len(pattern):
        char = pattern[i : i + 1]
        if char == b"*":
            # git matches the literal beginning first, so `**` directly after it counts as the beginning of a pattern
            part, i = _translate_stars(pattern, i, at_start=i == literal or pattern[i - 1 : i] == b"/", by_name=by_name)
        elif char == b"?":
            part, i = (b"." if by_name else b"[^/]"), i + 1
        elif char == b"[":
            part, i = _translate_bracket(pattern, i + 1, by_name=by_name, fold=fold)
        elif char == b"\\":
            part, i = re.escape(pattern[i + 1 : i + 2]), i + 2
            if i > len(pattern):
                return None
        else:
            part, i = re.escape(char.lower() if fold else char), i + 1
        if part == _NEVER:
            return None
        parts.append(part)
    return b"".join(parts)


def _translate_stars(pattern: bytes, start: int, *, at_start: bool, by_name: bool) -> tuple[bytes, int]:
    end = start
    while pattern[end : end + 1] == b"*":
        end += 1
    if by_name:
        return b".*", end
    rest = pattern[end:]
    if end - start < 2 or not at_start or (rest and not rest.startswith((b"/", b"\\/"))):
        return b"[^/]*", end
    if rest.startswith(b"/"):
        return b"(?:.*/)?", end + 1
    return b".*", end


def _translate_bracket(pattern: bytes, start: int, *, by_name: bool, fold: bool) -> tuple[bytes, int]:
    """The class that begins after `[`, and where the pattern continues; _NEVER for a class without an end."""
    i = start
    negated = pattern[i : i + 1] in (b"!", b"^")
    i += negated
    members, previous, first = set[int](), -1, True
    while first or pattern[i : i + 1] != b"]":
        first = False
        char = pattern[i : i + 1]
        if char == b"-" and previous >= 0 and pattern[i + 1 : i + 2] not in (b"", b"]"):
            i += 2 if pattern[i + 1 : i + 2] == b"\\" else 1
            if i >= len(pattern):
                return _NEVER, i
            reached = bytes(range(previous, pattern[i] + 1))
            members.update(reached + reached.lower() if fold else reached)
            previous = -1
        elif pattern[i : i + 2] == b"[:" and (close := pattern.find(b"]", i + 2)) > i + 2 and pattern[close - 1] == 58:
            known = _CLASSES.get(pattern[i + 2 : close - 1])
            if known is None:
                return _NEVER, i
            reached = bytes(c for c in range(256) if re.match(known, bytes([c])))
            members.update(reached + reached.lower() if fold else reached)
            i, previous = close, -1
        else:
            i += char == b"\\"
            if i >= len(pattern):
                return _NEVER, i
            members.add(pattern[i])
            previous = pattern[i]
        i += 1
        if i >= len(pattern):
            return _NEVER, i
    chosen = set(range(256)) - members if negated else members
    if not by_name:
        chosen.discard(ord("/"))
    return (b"[" + b"".join(b"\\x%02x" % c for c in sorted(chosen)) + b"]" if chosen else _NEVER), i + 1


def _alternation(regexes: Iterable[bytes]) -> re.Pattern[bytes]:
    return re.compile(b"|".join(b"(?:%s)" % r for r in regexes) or _NEVER, re.DOTALL)
