"""What a plan says of its job's interpreter. Stdlib only, Python 3.8: both ends use it."""

from typing import NamedTuple, Optional, Tuple


class PythonSpec(NamedTuple):
    """How the job's interpreter is chosen on the host."""

    explicit: Optional[str] = None
    requires: Tuple[str, ...] = ()
    """PEP 508 requirements that the interpreter must satisfy, and that are installed besides the lock."""
    lock: Optional[str] = None
    """The project's file from which a missing environment is built, relative to its root: a requirements file, a
    pyproject.toml (its project is installed) or a uv.lock (uv installs what it says)."""
    wheels: Optional[str] = None
    """Tree hash of a folder of wheels that travels along, for hosts without internet."""
    locked: Tuple[str, ...] = ()
    """What the lock asks for: the interpreter must satisfy it too. Addresses are without users and passwords."""
    constraints: Tuple[str, ...] = ()
    """Requirements that what is installed must satisfy, if it is installed."""
    unchecked: Tuple[str, ...] = ()
    """What the project asks for and no interpreter can be asked about, each with its place: it counts as unmet, but for
    an explicit interpreter, which is taken at the user's word."""
    python: str = ""
    """The versions of Python that do, `>=3.11,<4`."""
    paths: Tuple[str, ...] = ()
    """Folders of the project, relative to its root, that the job imports from."""
    variables: Tuple[str, ...] = ()
    """Names of variables in these files (`${TOKEN}`): their values stay out of the log."""
    key: str = ""
    """A hash of all that a build from `lock` reads; older plans have none."""
