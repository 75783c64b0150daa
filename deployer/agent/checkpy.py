"""Run by an interpreter that may become the job's: which requirements does it not meet? Prints one JSON object.

`checkpy.py REQUIREMENTS` (a JSON list of PEP 508 texts) -> {"executable", "version", "unmet": [text with what is
there], "folders": [where packages are looked for], "found": {name: version}}. Distributions
are looked up by their metadata; nothing is imported.

Stdlib only, Python 3.8; an older Python fails here and is no candidate.
"""

import sys

if sys.version_info < (3, 8):
    sys.exit("it is Python %d.%d.%d" % sys.version_info[:3])
sys.path[:] = sys.path[1:]  # this file's own folder

import json  # noqa: E402
import re  # noqa: E402
from importlib import import_module, metadata  # noqa: E402
from typing import Any, Callable, Dict, List, Optional, Tuple  # noqa: E402


def find_parser() -> Any:
    """packaging's Requirement, its own or pip's copy; None when neither is here."""
    for name in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            return import_module(name).Requirement
        except ImportError:
            continue
    return None


def parse_requirement(text: str, parser: Any) -> Tuple[str, Callable[[str], bool]]:
    """(name, test of a version); an empty name when the requirement is not meant for this interpreter."""
    if parser is None:
        return parse_simply(text)
    requirement = parser(text)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return "", bool
    return requirement.name, lambda version: _contains(requirement.specifier, version)


def _contains(specifier: Any, version: str) -> bool:
    # vendors' images call their build of 2.11 "2.11.0a0+abc": it serves as 2.11
    release = re.match(r"[0-9.]+", version)
    return specifier.contains(version, prereleases=True) or (
        "+" in version and release is not None and specifier.contains(release.group(), prereleases=True)
    )


def parse_simply(text: str) -> Tuple[str, Callable[[str], bool]]:
    """Without packaging: markers count as true, versions are compared by their leading numbers."""
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)@]*)", text)
    if match is None:
        raise ValueError("not a requirement: %r" % text)
    clauses = [clause.strip() for clause in match.group(2).split(",") if clause.strip()]
    return match.group(1), lambda version: all(_holds(clause, version) for clause in clauses)


def _holds(clause: str, version: str) -> bool:
    match = re.match(r"(===|==|!=|~=|>=|<=|>|<)\s*v?([0-9][0-9.]*)(\*?)", clause)
    if match is None:
        return False
    operator, wanted = match.group(1), _numbers(match.group(2))
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


def unmet(text: str, parser: Any, found: Dict[str, str]) -> Optional[str]:
    """What to tell about a requirement that is not met; None for one that is. `found` gets the version there."""
    try:
        name, test = parse_requirement(text, parser)
        if not name:
            return None
        version = found[name] = metadata.version(name)
        return None if test(version) else "%s (has %s)" % (text, version)
    except metadata.PackageNotFoundError:
        return "%s (not installed)" % text
    except ValueError:
        return "%s (cannot be checked)" % text


def main() -> None:
    parser = find_parser()
    found: Dict[str, str] = {}
    answers = [unmet(text, parser, found) for text in json.loads(sys.argv[1])]
    result = {
        "executable": sys.executable,
        "version": "%d.%d.%d" % sys.version_info[:3],
        "unmet": [answer for answer in answers if answer is not None],
        "folders": [path for path in sys.path if path],
        "found": found,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
