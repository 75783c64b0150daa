"""Editable installs in an environment that outlives the job to whose copy of the project they point.

Each job runs in its own copy, which TORCHFERRY_RUN_DIR names. So paths of the first job's copy that an installer wrote
are replaced by code that reads this variable. Stdlib only, Python 3.8: this package runs on the host.
"""

import glob
import os
import re
from typing import FrozenSet

from ..host.errors import AgentError
from ..host.files import write_whole
from ..host.layout import RUN_DIR_ENV

_CODE = "/code"
_RUN_DIR = "__import__('os').environ.get(%r, '')" % RUN_DIR_ENV


def compiled_modules(code_dir: str) -> FrozenSet[str]:
    found = set()
    for folder, _, names in os.walk(code_dir):
        found |= {os.path.relpath(os.path.join(folder, name), code_dir) for name in names if name.endswith(".so")}
    return frozenset(found)


def share_editables(environment: str, code_dir: str, before: FrozenSet[str]) -> None:
    """Raises AgentError for an editable install that only works for the job that made it. `before`: the tree's compiled
    modules as they were sent."""
    for name in sorted(compiled_modules(code_dir) - before):
        raise _refusal("builds %s into the project's own folder" % name)
    site = os.path.join(glob.escape(environment), "lib", "python*", "site-packages")
    for path in glob.glob(os.path.join(site, "*.pth")) + glob.glob(os.path.join(site, "*.py")):
        if not os.path.islink(path):
            for folder in {code_dir, os.path.realpath(code_dir)}:
                _share(path, folder)


def _share(path: str, folder: str) -> None:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as f:
        text = f.read()
    if folder not in text:
        return
    if path.endswith(".pth"):
        text = "".join(_line_of_pth(line, folder) + "\n" for line in text.splitlines())
    # in a finder's table, a string that begins with the folder becomes an expression
    begin = r"(['\"])%s(?=[/'\"])" % re.escape(folder)
    text = re.sub(begin, lambda match: "%s + %s%s" % (_RUN_DIR, match.group(1), _CODE), text)
    if folder in text:
        raise _refusal("points to the folder of the first job in %s" % os.path.basename(path))
    # a separate file: an installer's cache may share this one by a hard link
    write_whole(path, text.encode("utf-8", "surrogateescape"))


def _line_of_pth(line: str, folder: str) -> str:
    below = line.rstrip()
    if below != folder and not below.startswith(folder + "/"):
        return line
    return "import sys; sys.path.append(%s + %r)" % (_RUN_DIR, _CODE + below[len(folder) :])


def _refusal(why: str) -> AgentError:
    return AgentError(
        "host",
        "an editable install of the project %s, which no other job has" % why,
        "write the path without -e: it is then built anew whenever its files change",
    )
