"""The plan's requirements for the job's interpreter. Stdlib only, Python 3.8: both sides use it."""

from typing import NamedTuple, Optional, Tuple


class PythonSpec(NamedTuple):
    """How the job's interpreter is chosen on the host."""

    explicit: Optional[str] = None
    requires: Tuple[str, ...] = ()
    """PEP 508 requirements that the interpreter must meet, and that are installed in addition to the lock."""
    lock: Optional[str] = None
    """The project's file from which a missing environment is built, relative to its root: a requirements file, a
    pyproject.toml (its project is installed) or a uv.lock (uv installs it)."""
    wheels: Optional[str] = None
    """Tree hash of a folder of wheels that is sent too, for hosts without internet."""
    locked: Tuple[str, ...] = ()
    """The lock's requirements, which the interpreter must meet too. Addresses are without users and passwords."""
    constraints: Tuple[str, ...] = ()
    """Requirements that a package must meet if it is installed."""
    unchecked: Tuple[str, ...] = ()
    """Requirements of the project that cannot be checked in an interpreter, each with its place. They count as unmet,
    except for an explicit interpreter, which the user vouches for."""
    python: str = ""
    """The allowed versions of Python, `>=3.11,<4`."""
    paths: Tuple[str, ...] = ()
    """Folders of the project, relative to its root, that the job imports from."""
    variables: Tuple[str, ...] = ()
    """Names of variables in these files (`${TOKEN}`): their values are hidden in the log."""
    key: str = ""
    """A hash of all files that a build from `lock` reads; empty in older plans."""
