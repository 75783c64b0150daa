"""Explains a missing module: which file of the project lists it, and why it was not installed.

Stdlib only, Python 3.8: this package runs on the host.
"""

import glob
import os
import re
from typing import Iterator, NamedTuple, Optional

from .foreign import FILES, advice
from .spec import PythonSpec

_DISTRIBUTIONS = {
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "Crypto": "pycryptodome",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "git": "gitpython",
    "hydra": "hydra-core",
    "PIL": "pillow",
    "pkg_resources": "setuptools",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}
"""Module -> distribution, if they have different names."""
_SIZE = 4 << 20
_DEPTH, _FOLDERS = 3, 2000


class Absent(NamedTuple):
    line: str
    hint: str


def explain_module(name: str, code_dir: str, spec: PythonSpec, python: str) -> Optional[Absent]:
    """Explains a missing module (its dotted name); None if the project has the module and only a part of it is missing.
    `python`: the interpreter that does not have it."""
    module, _, part = name.partition(".")
    for folder in _own(module, code_dir):
        if part and os.path.isdir(os.path.join(code_dir, folder, module)):
            return None  # it was found, and something in it is missing
        where = "%s/%s" % (folder, module) if folder != "." else module
        line = "%s is the project's own, at %s, where Python does not look" % (module, where)
        return Absent(line, "--env PYTHONPATH=%s makes it look there" % folder)
    wanted = _DISTRIBUTIONS.get(module, module.replace("_", "-"))
    for path in _lists(code_dir, spec):
        if _names(os.path.join(code_dir, path), wanted):
            return _unused(path, wanted, spec, python)
    line = "%s has no %s, and no file of the project asks for it" % (python, wanted)
    return Absent(line, "add %s to requirements.txt, or name an interpreter that has it with --python P" % wanted)


def _unused(path: str, name: str, spec: PythonSpec, python: str) -> Absent:
    foreign = advice(path)
    if foreign:
        return Absent("%s names %s, but is %s, which is not built here" % (path, name, foreign[0]), foreign[1])
    is_asked = any(re.match(re.escape(name) + r"(?![\w-])", _plain(text)) for text in spec.requires + spec.locked)
    if is_asked:
        line = "%s asks for %s, and %s has a distribution of that name without the module" % (path, name, python)
        return Absent(
            line, "add the one that holds it to %s, or name an interpreter that has it with --python P" % path
        )
    if path.endswith("pyproject.toml") and spec.lock == path:
        line = "%s names %s, but not among project.dependencies, which alone are asked for" % (path, name)
        return Absent(line, "a requirements file with -e .[EXTRA], and --requirements FILE, asks for an extra's too")
    line = "%s names %s, but what it lists was not asked of %s" % (path, name, python)
    what = "what its project.dependencies list" if path.endswith("pyproject.toml") else "it"
    return Absent(line, "--requirements %s asks for %s" % (path, what))


def _own(module: str, code_dir: str) -> Iterator[str]:
    """Folders of the project that contain the module, the outermost first."""
    level, seen = ["."], 0
    for _ in range(_DEPTH + 1):
        inner = []
        for folder in level:
            seen += 1
            here = os.path.join(code_dir, folder, module)
            if os.path.isfile(here + ".py") or glob.glob(os.path.join(glob.escape(here), "*.py")):
                yield folder
            if seen < _FOLDERS:
                inner += [
                    os.path.normpath(os.path.join(folder, name)) for name in _folders(os.path.join(code_dir, folder))
                ]
        level = inner


def _folders(path: str) -> Iterator[str]:
    try:
        with os.scandir(path) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    except OSError:
        return iter(())
    return iter(sorted(names))


def _lists(code_dir: str, spec: PythonSpec) -> Iterator[str]:
    """The files that may list the module, the lock first."""
    if spec.lock:
        yield spec.lock
    found = glob.glob(os.path.join(glob.escape(code_dir), "requirements*.txt"))
    found += glob.glob(os.path.join(glob.escape(code_dir), "requirements", "*.txt"))
    named = [os.path.join(code_dir, name) for name in ("uv.lock", "pyproject.toml", *FILES)]
    for path in sorted(found) + named:
        relative = os.path.relpath(path, code_dir)
        if relative != spec.lock and os.path.isfile(path):
            yield relative


def _names(path: str, name: str) -> bool:
    try:
        with open(path, "rb") as f:
            text = f.read(_SIZE).decode("utf-8", "replace")
    except OSError:
        return False
    return re.search(r"(?<![\w/.-])%s(?![\w-]|\.\w)" % re.escape(name), _plain(text)) is not None


def _plain(text: str) -> str:
    return re.sub(r"(?m)(?:^|\s)#.*$", "", text).lower().replace("_", "-")
