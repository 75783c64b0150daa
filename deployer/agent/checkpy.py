"""Run by an interpreter that may become the job's: checks which requirements it does not meet, and prints one JSON
object.

stdin: {"requires": [PEP 508 text], "constraints": [the same], "python": versions} -> {"executable", "version", "unmet":
[text with the installed version], "folders": [where packages are looked for], "found": {name: version}}. Distributions
are looked up by their metadata; nothing is imported. A requirement that cannot be checked counts as unmet.

Stdlib only, Python 3.8; an older Python fails here and is not a candidate.
"""

import sys

if sys.version_info < (3, 8):
    sys.exit("it is Python %d.%d.%d" % sys.version_info[:3])
sys.path[:] = sys.path[1:]  # this file's own folder

import ast  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
from importlib import import_module, metadata  # noqa: E402
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple  # noqa: E402

_PLAIN_VERSION = re.compile(r"v?([0-9]+(?:\.[0-9]+)*)(?:(?:a|b|rc)[0-9]+(?=\+))?(?:\+[a-z0-9.]+)?\Z")
"""Without packaging: a version with a phase (1.0rc1, 1.0.post1) cannot be compared, except a vendor's build."""


class ParsedRequirement(NamedTuple):
    name: str
    extras: Tuple[str, ...]
    url: str
    fits: Callable[[str], bool]
    """Whether a version fits. Raises ValueError if that cannot be determined."""
    applies: Callable[[str], bool]
    """Whether the requirement applies to this interpreter, with this extra ("" for none). Raises ValueError as
    above."""


def find_parser() -> Any:
    """packaging's Requirement, from packaging or from pip's copy; None if neither is installed."""
    for name in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            return import_module(name).Requirement
        except ImportError:
            continue
    return None


def parse_requirement(text: str, parser: Any) -> ParsedRequirement:
    """Raises ValueError if the text is not a requirement."""
    if parser is None:
        return parse_simply(text)
    found = parser(text)
    marker = found.marker
    return ParsedRequirement(
        found.name,
        tuple(found.extras),
        found.url or "",
        lambda version: _contains(found.specifier, version),
        lambda extra: marker is None or bool(marker.evaluate({"extra": extra})),
    )


def _contains(specifier: Any, version: str) -> bool:
    # vendors' images call their build of 2.11 "2.11.0a0+abc": it counts as 2.11
    release = re.match(r"[0-9.]+", version)
    return specifier.contains(version, prereleases=True) or (
        "+" in version and release is not None and specifier.contains(release.group(), prereleases=True)
    )


def parse_simply(text: str) -> ParsedRequirement:
    """Without packaging: only versions of plain numbers, and markers that read like Python."""
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^]]*)\])?\s*(?:@\s*(\S+)|\(?([^;)@]*)\)?)\s*(?:;(.*))?\Z", text)
    if match is None:
        raise ValueError("not a requirement: %r" % text)
    name, extras, url, specifier, marker = match.groups(default="")
    clauses = [clause.strip() for clause in specifier.split(",") if clause.strip()]
    return ParsedRequirement(
        name,
        tuple(extra.strip() for extra in extras.split(",") if extra.strip()),
        url,
        lambda version: all(_holds(clause, version) for clause in clauses),
        lambda extra: not marker.strip() or _evaluate(ast.parse(marker.strip(), mode="eval").body, extra),
    )


def _evaluate(node: Any, extra: str) -> bool:
    """The value of a marker, whose grammar is Python's except for `~=` and `===`. Raises ValueError for anything
    else."""
    if isinstance(node, ast.BoolOp):
        values = [_evaluate(value, extra) for value in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        raise ValueError("not a marker")
    left, right = (_operand(side, extra) for side in (node.left, node.comparators[0]))
    names = [side.id for side in (node.left, node.comparators[0]) if isinstance(side, ast.Name)]
    if isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return (left in right) == isinstance(node.ops[0], ast.In)
    operator = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}[
        type(node.ops[0])
    ]
    if all(name in ("python_version", "python_full_version", "implementation_version") for name in names):
        if isinstance(node.left, ast.Name):
            return _holds(operator + right, left)
        return _holds(operator.translate({60: ">", 62: "<"}) + left, right)
    if operator not in ("==", "!="):
        raise ValueError("no order is known for %s" % names)
    return (left == right) == (operator == "==")


def _operand(node: Any, extra: str) -> str:
    import platform

    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    known = {
        "python_version": "%d.%d" % sys.version_info[:2],
        "python_full_version": platform.python_version(),
        "implementation_version": platform.python_version(),
        "os_name": os.name,
        "sys_platform": sys.platform,
        "platform_machine": platform.machine(),
        "platform_system": platform.system(),
        "platform_release": platform.release(),
        "platform_version": platform.version(),
        "platform_python_implementation": platform.python_implementation(),
        "implementation_name": sys.implementation.name,
        "extra": extra,
    }
    if not isinstance(node, ast.Name) or node.id not in known:
        raise ValueError("not a marker")
    return known[node.id]


def _holds(clause: str, version: str) -> bool:
    match = re.match(r"(===|==|!=|~=|>=|<=|>|<)\s*v?([0-9]+(?:\.[0-9]+)*)(?:(\.\*)|(\+[a-z0-9.]+))?\Z", clause)
    if match is None or not _PLAIN_VERSION.match(version):
        raise ValueError("cannot compare %s with %s" % (version, clause))
    operator, wanted = match.group(1), _numbers(match.group(2))
    if match.group(4):  # a local version is compared as it is written
        return (version == match.group(2) + match.group(4)) == (operator != "!=")
    have = _numbers(version)
    if match.group(3) or operator == "~=":
        prefix = wanted[:-1] if operator == "~=" else wanted
        same = have[: len(prefix)] == prefix
        return (same and have >= wanted) if operator == "~=" else same == (operator != "!=")
    width = max(len(have), len(wanted))
    have, wanted = have + [0] * (width - len(have)), wanted + [0] * (width - len(wanted))
    answers = {"==": have == wanted, "===": have == wanted, "!=": have != wanted}
    answers.update({">=": have >= wanted, "<=": have <= wanted, ">": have > wanted, "<": have < wanted})
    return answers[operator]


def _numbers(version: str) -> List[int]:
    leading = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return [int(part) for part in leading.group().split(".")] if leading else [0]


def unmet(text: str, parser: Any, found: Dict[str, str], *, constraint: bool = False) -> List[str]:
    """What is missing for a requirement or its extras; [] if nothing is. `found` gets the installed version. A package
    that is not installed meets a constraint."""
    try:
        return _unmet(text, parser, found, "", constraint, set())
    except RecursionError:
        return ["%s (cannot be checked)" % text]


def _unmet(
    text: str, parser: Any, found: Dict[str, str], extra: str, constraint: bool, seen: Set[Tuple[str, str]]
) -> List[str]:
    if (text, extra) in seen:
        return []
    seen.add((text, extra))
    try:
        wanted = parse_requirement(text, parser)
        if not wanted.applies(extra):
            return []
        there = metadata.distribution(wanted.name)
        version = found[wanted.name] = there.version
        if wanted.url and not _is_from(there.read_text("direct_url.json"), wanted.url):
            return ["%s (has %s, not from there)" % (text, version)]
        if not wanted.fits(version):
            return ["%s (has %s)" % (text, version)]
        lacking = []
        for name in () if constraint else wanted.extras:
            for asked in there.requires or ():
                if "extra" in asked and not parse_requirement(asked, parser).applies(""):
                    lacking += _unmet(asked, parser, found, name, False, seen)
        return lacking
    except metadata.PackageNotFoundError:
        return [] if constraint else ["%s (not installed)" % text]
    except Exception:  # of a library's parser, or of metadata that are damaged
        return ["%s (cannot be checked)" % text]


def _is_from(record: Optional[str], url: str) -> bool:
    """Whether a distribution was installed from this address, according to its direct_url.json; users, passwords and
    what follows `?` or `#` do not count."""
    known = json.loads(record or "{}")
    vcs = known.get("vcs_info", {})
    wanted, revision = url, ""
    if vcs:
        wanted = wanted.partition("+")[2]
        head, _, tail = wanted.rpartition("/")
        tail, _, revision = tail.partition("@")
        wanted = head + "/" + tail
        commit = str(vcs.get("commit_id", ""))
        if revision not in ("", vcs.get("requested_revision"), commit):
            return False
    return _bare(str(known.get("url", ""))) == _bare(wanted)


def _bare(url: str) -> str:
    return re.sub(r"[?#].*", "", re.sub(r"(?<=://)[^/@]*@", "", url))


def python_fits(specifier: str, parser: Any) -> bool:
    return not specifier or parse_requirement("python" + specifier, parser).fits("%d.%d.%d" % sys.version_info[:3])


def as_bytes_are(path: str) -> str:
    """The path as the caller decodes it: this Python may run in a locale that is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")


def main() -> None:
    asked = json.loads(sys.stdin.read())
    parser = find_parser()
    found: Dict[str, str] = {}
    lacking = []  # type: List[str]
    try:
        if not python_fits(asked["python"], parser):
            lacking.append("python%s" % asked["python"])
    except ValueError:
        lacking.append("python%s (cannot be checked)" % asked["python"])
    base_fits = not lacking
    for text in asked["requires"]:
        lacking += unmet(text, parser, found)
    for text in asked["constraints"]:
        lacking += unmet(text, parser, found, constraint=True)
    result = {
        "executable": as_bytes_are(sys.executable),
        "version": "%d.%d.%d" % sys.version_info[:3],
        "python_fits": base_fits,
        "unmet": list(dict.fromkeys(lacking)),
        "folders": [as_bytes_are(path) for path in sys.path if path],
        "found": found,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
