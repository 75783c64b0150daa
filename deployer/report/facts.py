"""Reads the facts about a run from its files. The files are not trusted: sizes are limited and types are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deployer.agent.host.typed import InvalidData, from_json, load_json, parse
from deployer.agent.job.plan import Plan, parse_plan
from deployer.agent.job.record import Record
from deployer.agent.job.status import Status
from deployer.curves.metrics import Metrics
from trainer.config.fields import Misfit, Word, fit_scalar
from trainer.config.files import parse_yaml
from trainer.config.load import ConfigError, config_to_dict
from trainer.schema import Config

Read = Callable[[str, int], bytes | None]
"""Reads at most this many bytes of a file of the run, from its beginning or its end; None if there is no file."""

MAX_FILE = 8 << 20
MAX_SAMPLES = 400
MAX_LEAVES = 1000
MAX_PROFILES = 4
CONCEALED = ("target.env",)
"""Mappings of which only the names are shown: values of --env may be secrets."""


class Sample(NamedTuple):
    """A text that the model generated: a line of samples.jsonl."""

    text: str
    prompt: str = ""
    step: int | None = None


class Share(NamedTuple):
    """A row of a step's profile."""

    name: str
    ms: float
    percent: float = 0.0
    hidden_ms: float = 0.0
    calls: int = 0


class Profile(NamedTuple):
    """The parts of a step's time, as trainer/profile writes them."""

    step: int
    rank: int
    span_ms: float
    shares: tuple[Share, ...]
    on_device: bool = True


class Outcome(NamedTuple):
    """The end of a run, as the trainer writes it."""

    state: str = ""
    reason: str | None = None
    export: str | None = None


class Git(NamedTuple):
    """The commit of a project, and whether it had uncommitted changes."""

    commit: str = ""
    branch: str | None = None
    dirty: bool = False


@dataclass(frozen=True)
class Patch:
    """Counts of uncommitted changes."""

    files: int
    added: int
    removed: int


@dataclass(frozen=True)
class ConfigFacts:
    """The values of a config by dotted key."""

    values: Mapping[str, object]
    changed: Mapping[str, object]
    """The values that differ from the default, or have no default."""


@dataclass
class Facts:
    """All facts that the files of a run contain."""

    name: str
    status: Status | None = None
    plan: Plan | None = None
    record: Record | None = None
    git: Git | None = None
    patch: Patch | None = None
    outcome: Outcome | None = None
    config: ConfigFacts | None = None
    metrics: Metrics | None = None
    samples: list[Sample] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    damages: list[str] = field(default_factory=list)


def read_facts(
    name: str, read: Read, metrics: Metrics | None, status: Status | None, *, read_end: Read | None = None
) -> Facts:
    """Reads the facts, except the profiles; a file that cannot be parsed becomes a line in `damages`. `read` returns
    the beginning of a long file, `read_end` its end; without `read_end`, `read` is used for both."""
    facts = Facts(name, status=status, metrics=metrics)
    _guarded(facts, "job.json", lambda: _take_record(facts, read))
    _guarded(facts, "outcome.json", lambda: _take_outcome(facts, read))
    _guarded(facts, "config.yaml", lambda: _take_config(facts, read))
    facts.patch = _patch(read("git.patch", MAX_FILE))
    facts.samples = _samples((read_end or read)("samples.jsonl", MAX_FILE))
    return facts


def profile_names(config: ConfigFacts | None) -> list[str]:
    """The paths of the trainer's profiles of rank 0, from its config."""
    steps = config.values.get("train.profile_steps") if config is not None else None
    numbers = [step for step in steps if type(step) is int and 0 <= step < 1 << 40] if isinstance(steps, list) else []
    return [f"profile/step_{step:06d}_rank_0.json" for step in numbers[:MAX_PROFILES]]


def take_profiles(facts: Facts, read: Read) -> None:
    for path in profile_names(facts.config):
        _guarded(facts, path, lambda path=path: _take_profile(facts, read, path))  # type: ignore[misc]


def _guarded(facts: Facts, file: str, take: Callable[[], None]) -> None:
    try:
        take()
    except (InvalidData, ConfigError) as error:
        facts.damages.append(f"{file} is not understood: {error}")


def _take_record(facts: Facts, read: Read) -> None:
    data = read("job.json", MAX_FILE + 1)
    if data is None:
        return
    facts.record = parse(data, Record, most=MAX_FILE)
    if facts.record.git is not None:
        facts.git = from_json(facts.record.git, Git)
    facts.plan = parse_plan(facts.record.plan)


def _take_outcome(facts: Facts, read: Read) -> None:
    data = read("outcome.json", MAX_FILE + 1)
    facts.outcome = None if data is None else parse(data, Outcome, most=MAX_FILE)


def _take_config(facts: Facts, read: Read) -> None:
    data = read("config.yaml", 1 << 20)
    if data is None and facts.plan is not None and facts.plan.config_yaml is not None:
        data = facts.plan.config_yaml.encode("utf-8", "replace")
    if data is None:
        return
    tree, _ = parse_yaml(data, "config.yaml")
    values: dict[str, object] = {}
    _flatten(_plain(tree), "", values)
    defaults: dict[str, object] = {}
    _flatten(config_to_dict(Config()), "", defaults)
    changed = {key: value for key, value in values.items() if key not in defaults or defaults[key] != value}
    facts.config = ConfigFacts(values, changed)


def _plain(value: object) -> object:
    """A value as the trainer reads it if its schema has no type for it: no dates, and no infinite numbers."""
    if isinstance(value, Word):
        with suppress(Misfit):
            return fit_scalar(value, bool | int | float | str | None)
        return value.text
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _flatten(tree: object, key: str, found: dict[str, object]) -> None:
    if len(found) >= MAX_LEAVES:
        return
    if key in CONCEALED and isinstance(tree, Mapping):
        found[key] = sorted(map(str, tree))
    elif isinstance(tree, Mapping) and tree and key.count(".") < 5:
        for name, value in tree.items():
            _flatten(value, f"{key}.{name}" if key else str(name), found)
    else:
        found[key] = list(tree) if isinstance(tree, tuple) else tree


def _patch(data: bytes | None) -> Patch | None:
    if not data:
        return None
    lines = data.split(b"\n")
    added = sum(line.startswith(b"+") and not line.startswith(b"+++ ") for line in lines)
    removed = sum(line.startswith(b"-") and not line.startswith(b"--- ") for line in lines)
    return Patch(sum(line.startswith(b"diff --git ") for line in lines), added, removed)


def _samples(data: bytes | None) -> list[Sample]:
    """The last samples. Lines that are not a sample are skipped."""
    found = []
    for line in (data or b"").split(b"\n")[-MAX_SAMPLES - 1 :]:
        with suppress(InvalidData):
            found.append(from_json(load_json(line, most=1 << 20), Sample))
    return found


def _take_profile(facts: Facts, read: Read, path: str) -> None:
    data = read(path, MAX_FILE + 1)
    if data is not None:
        facts.profiles.append(parse(data, Profile, most=MAX_FILE))


def setting(text: str) -> tuple[str, str]:
    """A setting of a plan, `KEY=JSON`, as key and value; only the names if it may contain secrets."""
    key, _, value = text.partition("=")
    if key in CONCEALED:
        names: Any = None
        with suppress(InvalidData):
            names = load_json(value.encode("utf-8", "replace"))
        return key, ", ".join(map(str, names)) if isinstance(names, Mapping) else "…"
    return key, "…" if key.startswith(tuple(f"{name}." for name in CONCEALED)) else value
