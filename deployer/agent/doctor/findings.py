"""The finding of a doctor check. A check that crashes gives a finding too.

Stdlib only, Python 3.8: this package runs on the host.
"""

from typing import Callable, Dict, Iterable, List, Union

from ..host.errors import AgentError

OK, WARN, FAIL = "ok", "warn", "fail"

Check = Dict[str, str]
Found = Union[Check, Iterable[Check], None]


def check(name: str, status: str, detail: str, hint: str = "") -> Check:
    return {"name": name, "status": status, "detail": detail, "hint": hint}


def run_check(name: str, examine: Callable[[], Found]) -> List[Check]:
    """The findings of one check; empty if it does not apply here. Never raises."""
    try:
        found = examine()
        if found is None:
            return []
        return [found] if isinstance(found, dict) else list(found)
    except AgentError as error:
        return [check(name, FAIL, error.message, error.hint)]
    except Exception as error:
        return [check(name, FAIL, "this check failed itself: %r" % error, "please report it")]


def gigabytes(size: float) -> str:
    return "%.1f GB" % (size / 1e9) if size < 1e11 else "%.0f GB" % (size / 1e9)
