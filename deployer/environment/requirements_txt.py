"""Requirements files as pip reads them, to find the requirements in each line. pip or uv install from the file itself.

Lines are read as in pip (`pip/_internal/req/req_file.py`): joined, stripped of comments, split into a requirement and
options. Variables (`${TOKEN}`) are never resolved here: only the installer reads a line that needs one.
"""

from __future__ import annotations

import codecs
import posixpath
import re
import shlex
from collections.abc import Iterator
from optparse import SUPPRESS_HELP, OptionParser, Values
from typing import NoReturn
from urllib.parse import unquote

from packaging.markers import InvalidMarker, Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

from deployer.environment.needs import Needs, Tree, cut, without_secrets
from deployer.environment.project import read_project
from deployer.errors import UsageError

_COMMENT = re.compile(r"(^|\s+)#.*$")
_NAMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[^]]*\])?\s*@")
_URL = re.compile(r"(https?|ftp|file|git|hg|svn|bzr)(\+[a-z]+)?:", re.IGNORECASE)
_ARCHIVES = (
    ".whl",
    ".zip",
    ".tar.gz",
    ".tgz",
    ".tar",
    ".tar.bz2",
    ".tbz",
    ".tar.xz",
    ".txz",
    ".tlz",
    ".tar.lz",
    ".tar.lzma",
)
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
)
_DEEPEST = 50


def read_requirements(tree: Tree, path: str, needs: Needs) -> None:
    """Adds the requirements of the file and of all files that it names. Raises UsageError, with file and line, for
    input that pip cannot read either: a missing file, a file that includes itself, an invalid requirement."""
    _Reader(tree, needs).file(path, "", ())


class _Reader:
    def __init__(self, tree: Tree, needs: Needs) -> None:
        self._tree = tree
        self._needs = needs
        self._done: set[tuple[str, bool]] = set()

    def file(self, path: str, place: str, above: tuple[str, ...], *, constraint: bool = False) -> None:
        if path in above or len(above) > _DEEPEST:
            way = " -> ".join((*above[-3:], path))
            raise UsageError(f"{place}: {path} names itself ({cut(way)})", hint="take one of these lines out")
        if (path, constraint) in self._done:
            return
        self._done.add((path, constraint))
        lines = list(logical_lines(_decode(self._tree.read(path, place), path)))
        self._needs.built_from(path, [line for _, line in lines])
        for number, line in lines:
            self._line(line, f"{path}:{number}", (*above, path), constraint)

    def _line(self, line: str, place: str, above: tuple[str, ...], constraint: bool) -> None:
        self._needs.variables += [v for v in _VARIABLE.findall(line) if v not in self._needs.variables]
        text, options = _options(line, place)
        for editable in options.editable:
            self._place(editable, place, editable=True)
        if text:
            self._requirement(text, place, constraint)
        elif not options.editable:
            here = posixpath.dirname(above[-1])
            for named in options.requirement:
                self._include(named, place, above, here, constraint)
            for named in options.constraint:
                self._include(named, place, above, here, True)
            for folder in options.find_links:
                self._find_links(folder, here)

    def _include(self, named: str, place: str, above: tuple[str, ...], here: str, constraint: bool) -> None:
        if _URL.match(named) or _VARIABLE.search(named) or named.endswith(".toml"):
            self._needs.cannot_check(place, named)
        else:
            path = self._tree.inside(posixpath.join(here, named), place)
            self.file(path, place, above, constraint=constraint)

    def _find_links(self, folder: str, here: str) -> None:
        for base in (here, ""):
            path = posixpath.normpath(posixpath.join(base, folder.removeprefix("file:")))
            if files := self._tree.below(path):
                self._needs.built_from(sorted(files.items()))
                return

    def _requirement(self, text: str, place: str, constraint: bool) -> None:
        head = text.partition(";")[0].strip()
        named = _NAMED.match(text)
        if not named and (_URL.match(text) or "/" in head or head.startswith(".") or _is_archive(head)):
            self._place(text, place)
            return
        try:
            self._needs.require(Requirement(text), constraint=constraint)
        except InvalidRequirement as error:
            if not _VARIABLE.search(text):
                raise _not_a_requirement(text, place, error) from None
            self._needs.cannot_check(place, text)

    def _place(self, text: str, place: str, *, editable: bool = False) -> None:
        """Adds a requirement that is an address or a path. Its name comes from the file name or from `#egg=`, if given
        there."""
        head, _, condition = text.partition("; " if _URL.match(text) else ";")
        marker = _marker(condition.strip(), text, place)
        head, extras = _split_extras(head.strip())
        if _VARIABLE.search(head.partition("://")[0] if "://" in head else head):
            self._needs.cannot_check(place, text)
        elif _URL.match(head) and not re.match(r"file:(?!//)", head):
            self._address(head, place, marker)
        else:
            self._path(head.removeprefix("file:"), extras, place, marker, editable=editable)

    def _address(self, url: str, place: str, marker: Marker | None) -> None:
        egg = re.search(r"[#&]egg=([A-Za-z0-9._-]+)", url)
        file = unquote(posixpath.basename(re.sub(r"[?#].*", "", url)))
        name = egg.group(1) if egg else (_of_file(file) or ("",))[0]
        if not name or _VARIABLE.search(without_secrets(url)):
            self._needs.cannot_check(place, url)
            return
        requirement = Requirement(f"{name} @ {without_secrets(url)}")
        requirement.marker = marker
        self._needs.require(requirement)

    def _path(self, path: str, extras: str, place: str, marker: Marker | None, *, editable: bool) -> None:
        inside = self._tree.inside(path, place)
        if self._tree.has(inside):
            self._needs.built_from(inside, self._tree.digests[inside])
            known = _of_file(posixpath.basename(inside))
            if known is None:
                self._needs.cannot_check(place, path)
            else:
                requirement = Requirement(f"{known[0]}=={known[1]}")
                requirement.marker = marker
                self._needs.require(requirement)
        elif not (files := self._tree.below(inside)):
            self._tree.read(inside, place)  # which raises the error with the reason
        elif editable and marker is None:
            self._needs.built_from(inside)
            read_project(self._tree, inside, self._needs, place=place, extras=extras.split(","))
        else:
            self._needs.built_from(sorted(files.items()))
            self._needs.cannot_check(place, path)


# --- lines ------------------------------------------------------------------------------------------------------------


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, line) for each line that is not empty: joined at `\\`, without comments."""
    begun: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        comment = _COMMENT.match(line)
        first = first if begun else number
        begun.append((" " + line if comment else line).strip("\\") if line.endswith("\\") and not comment else line)
        if line.endswith("\\") and not comment:
            continue
        if comment:
            begun[-1] = " " + line  # so that the joined line ends here
        joined, begun = "".join(begun), []
        if stripped := _COMMENT.sub("", joined).strip():
            yield first, stripped
    if stripped := _COMMENT.sub("", "".join(begun)).strip():
        yield first, stripped


def _decode(data: bytes, path: str) -> str:
    coding = re.search(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", b"\n".join(data.split(b"\n")[:2]), re.MULTILINE)
    encoding = coding.group(1).decode("ascii") if coding else "utf-8"
    bom, encoding = next((known for known in _BOMS if data.startswith(known[0])), (b"", encoding))
    try:
        return data[len(bom) :].decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        raise UsageError(f"{path} is not {encoding}: {cut(str(error))}", hint="save it as UTF-8") from None


class _Parser(OptionParser):
    def error(self, msg: str) -> NoReturn:
        raise ValueError(msg)


def _make_parser() -> _Parser:
    parser = _Parser(usage=SUPPRESS_HELP, add_help_option=False)
    lists = {
        "requirement": ("-r", "--requirement"),
        "constraint": ("-c", "--constraint"),
        "editable": ("-e", "--editable"),
        "find_links": ("-f", "--find-links"),
        "_": (
            *("-i", "--index-url", "--pypi-url", "--extra-index-url", "--trusted-host", "--no-binary", "--only-binary"),
            *("--use-feature", "--hash", "-C", "--config-settings", "--config-setting", "--global-option"),
            *("--install-option", "--uploaded-prior-to"),
        ),
    }
    for name, words in lists.items():
        parser.add_option(*words, dest=name, action="append", default=[])
    for word in ("--no-index", "--prefer-binary", "--require-hashes", "--pre"):
        parser.add_option(word, dest="flags", action="store_true")
    return parser


_parser = _make_parser()


def _options(line: str, place: str) -> tuple[str, Values]:
    """The requirement in a line ("" for none), and its options."""
    words = line.split(" ")
    start = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    try:
        found, rest = _parser.parse_args(shlex.split(" ".join(words[start:])), Values(_fresh()))
    except ValueError as error:
        raise UsageError(
            f"{place}: {cut(without_secrets(line))}: {error}", hint="see pip's requirements file format"
        ) from None
    return " ".join((*words[:start], *rest)).strip(), found


def _fresh() -> dict[str, list[str]]:
    return {"requirement": [], "constraint": [], "editable": [], "find_links": [], "_": []}


# --- one requirement --------------------------------------------------------------------------------------------------


def _is_archive(text: str) -> bool:
    return text.lower().endswith(_ARCHIVES)


def _split_extras(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.+?)\[([^]]*)\]", text)
    return (match.group(1).strip(), match.group(2)) if match else (text, "")


def _of_file(name: str) -> tuple[str, str] | None:
    """(distribution, version) from the file name of a wheel or source archive."""
    try:
        found = parse_wheel_filename(name)[:2] if name.endswith(".whl") else parse_sdist_filename(name)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None
    return found[0], str(found[1])


def _marker(text: str, line: str, place: str) -> Marker | None:
    try:
        return Marker(text) if text else None
    except InvalidMarker as error:
        raise _not_a_requirement(line, place, error) from None


def _not_a_requirement(text: str, place: str, error: ValueError) -> UsageError:
    why = str(error).splitlines()[0]
    return UsageError(f"{place}: {cut(without_secrets(text))} is no requirement: {cut(why)}", hint="pip refuses it too")
