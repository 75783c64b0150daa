"""The events that --notify sends, as JSON.

Stdlib only, Python 3.8: both sides use it.
"""

from typing import Any, Dict, Literal, NamedTuple, Optional

from ..job.status import FAILED, LOST, STOPPED, SUCCEEDED, State

Name = Literal["start", "restart", "stall", "idle", "failure", "end"]
MAX_WORDS = 500


class Event(NamedTuple):
    id: str
    name: str
    event: Name
    state: State
    host: str
    time: str
    attempt: int = 1
    code: Optional[int] = None
    reason: str = ""
    step: Optional[int] = None
    loss: Optional[float] = None


def last_event(state: State) -> Name:
    """The last event of an ended job."""
    return "failure" if state in (FAILED, LOST) else "end"


def sentence(event: Event) -> str:
    """The event in one line of plain English."""
    whats = {
        "start": "has started",
        "restart": "starts again, attempt %d" % event.attempt,
        "stall": "has stalled",
        "idle": "leaves its GPUs idle",
        "failure": "is lost" if event.state == LOST else "failed",
        "end": {SUCCEEDED: "succeeded", STOPPED: "was stopped"}.get(event.state, event.state),
    }
    line = "%s %s on %s" % (event.id, whats[event.event], event.host)
    if event.step is not None:
        line += ", step %d" % event.step
    if event.loss is not None:
        line += ", loss %.4g" % event.loss
    return _plain(line + (": " + event.reason if event.reason and event.state != SUCCEEDED else ""))


def body_of(event: Event) -> Dict[str, Any]:
    """The JSON to send. Slack shows `text`, Discord `content`."""
    told = event._replace(reason=_plain(event.reason))._asdict()
    return {**told, "text": sentence(event), "content": sentence(event)}


def _plain(text: str) -> str:
    """The text as one printable line; it may contain the job's own output."""
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_WORDS]
