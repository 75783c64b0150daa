"""What a plan says of its job's interpreter. Stdlib only, Python 3.8: both ends use it."""

from typing import NamedTuple, Optional, Tuple


class PythonSpec(NamedTuple):
    """How the job's interpreter is chosen on the host."""

    explicit: Optional[str] = None
    requires: Tuple[str, ...] = ()
    """PEP 508 requirements that the interpreter must satisfy."""
    lock: Optional[str] = None
    """requirements.txt of the project, relative to its root: a missing environment is built from it."""
    wheels: Optional[str] = None
    """Tree hash of a folder of wheels that travels along, for hosts without internet."""
