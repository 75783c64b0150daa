"""Files that describe an environment in a form that is not built here. Stdlib only, Python 3.8: both sides use it."""

import os
from typing import Dict, Optional, Tuple

_TOOLS: Dict[str, Tuple[str, str]] = {
    "environment.yml": ("a file of conda", "conda env create -f {0} -p ENV"),
    "environment.yaml": ("a file of conda", "conda env create -f {0} -p ENV"),
    "conda-lock.yml": ("a lock of conda", "conda-lock install -p ENV {0}"),
    "Pipfile": ("a file of pipenv", "pipenv requirements > requirements.txt"),
    "Pipfile.lock": ("a lock of pipenv", "pipenv requirements > requirements.txt"),
    "poetry.lock": ("a lock of poetry", "poetry export -o requirements.txt"),
    "pdm.lock": ("a lock of pdm", "pdm export -o requirements.txt"),
    "pixi.toml": ("a file of pixi", "pixi install"),
    "pixi.lock": ("a lock of pixi", "pixi install"),
    "setup.py": ("a program that builds a package", "echo '-e .' > requirements.txt"),
    "setup.cfg": ("a file of setuptools", "echo '-e .' > requirements.txt"),
}
FILES = tuple(_TOOLS)


def advice(path: str) -> Optional[Tuple[str, str]]:
    """(what a file is, what to do instead); None for a supported file."""
    found = _TOOLS.get(os.path.basename(path))
    if found is None:
        return None
    what, command = found
    if command.startswith("pixi"):
        return (
            what,
            "%s on the host, in a copy of it, and --python .pixi/envs/default there, by its full path" % command,
        )
    if "-p ENV" in command:
        return what, "%s on the host makes it once, then --python ENV" % command.format(path)
    return what, "%s makes a file that is read" % command
