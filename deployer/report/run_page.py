"""The report of one run as an HTML page, section by section. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from deployer.agent.job.status import FAILED, FINAL, LOST, STOPPED, SUCCEEDED, Status, gpus_of, nproc_of
from deployer.curves.along import scale_of
from deployer.curves.metrics import Metrics, Series
from deployer.curves.points import LARGEST, Points
from deployer.curves.svg import svg_chart, svg_legend
from deployer.report.facts import Facts, Profile, Sample, setting
from deployer.report.page import chart, folded, lines, page, pairs, section, table, text
from deployer.terminal import counted, number

CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("loss", "eval_loss")),
    ("Learning rate", ("lr", "learning_rate")),
    ("Gradient norm", ("grad_norm",)),
    ("Tokens per second and process", ("tokens_per_s_per_gpu", "tokens_per_s", "tokens/s")),
    ("Memory, GiB", ("mem_gib",)),
    ("Model FLOPs utilisation", ("mfu",)),
)
"""The charts in their order, with the keys of each. If a program writes none of these keys, all its keys are drawn."""
MOST_CHARTS = 12
COLOUR: dict[str, str] = {SUCCEEDED: "good", FAILED: "bad", LOST: "bad", STOPPED: "warn"}


@dataclass(frozen=True)
class Told:
    """Facts for the page that are not in the run's files, as texts of this client."""

    as_of: str
    """When the run was read."""
    state: str = ""
    host: str = ""
    folder: str = ""
    trouble: str = ""
    """Why the host does not answer now."""
    causes: tuple[str, ...] = ()
    hint: str = ""
    log: str = ""
    """The last lines of the log that explains a failure best."""
    again: str = ""
    """The commands that start the run again."""
    environment: tuple[tuple[str, str], ...] = ()
    now: datetime | None = None
    notes: tuple[str, ...] = field(default=())


def run_page(facts: Facts, told: Told) -> str:
    title = facts.name.rstrip("/").rpartition("/")[2] or facts.name
    body = [
        _trouble(facts, told),
        section("In short", pairs(_in_short(facts, told))),
        section("Curves", _curves(facts.metrics)),
        section("Samples", _samples(facts.samples)),
        section("Where a step goes", *map(_profile, facts.profiles)),
        section("Config", *_config(facts)),
        section("Attempts", _attempts(facts.status)),
        section("Environment", pairs(_environment(facts, told))),
        section("To do it again", lines(told.again) if told.again else ""),
        section("Not told", *(f"<p>{text(note)}</p>" for note in (*facts.damages, *told.notes))),
    ]
    state = facts.status.state if facts.status else facts.outcome.state if facts.outcome else ""
    is_final = state in FINAL or not facts.status
    badge = f'<span class="state {COLOUR.get(state, "busy")}">{text(told.state or state)}</span>' if state else ""
    when = "" if is_final and not told.trouble else f"as of {text(told.as_of)}; "
    head = f'<h1>{text(title, 200)}</h1>\n<p class="sub">{badge}{when}{text(_verdict(facts, told))}</p>'
    return page(f"{title}: {state}" if state else title, head, body, f"made by Torchferry, {text(told.as_of)}")


def _verdict(facts: Facts, told: Told) -> str:
    """Duration, losses and host in one line."""
    parts = [_took(facts.status, told.now)]
    if facts.metrics is not None:
        ends = [("loss", "loss"), ("eval_loss", "held-out loss")]
        for key, words in ends:
            values = _finite(facts.metrics.get(key))
            if values:
                first, last = values[0][1], values[-1][1]
                parts.append(
                    f"{words} {number(first)} → {number(last)}" if len(values) > 1 else f"{words} {number(last)}"
                )
    parts.append(told.host and f"on {told.host}")
    return ", ".join(filter(None, parts))


def _trouble(facts: Facts, told: Told) -> str:
    """The reason, causes, hint and last log lines of a run that did not succeed, or whose host does not answer."""
    status = facts.status
    reason = status.reason if status is not None and status.state != SUCCEEDED else ""
    if facts.outcome is not None and facts.outcome.reason and facts.outcome.reason not in reason:
        reason = f"{reason}; {facts.outcome.reason}" if reason else facts.outcome.reason
    if told.trouble:
        reason = f"{reason}; {told.trouble}" if reason else told.trouble
    parts = [f"<p>{text(line)}</p>" for line in (reason, *told.causes) if line]
    parts += [f"<p>What to do: {text(told.hint)}</p>"] if told.hint else []
    parts += [f"<h3>The end of its log</h3>{lines(told.log)}"] if told.log else []
    inner = section("What happened", *parts)
    is_bad = status is not None and status.state in (FAILED, LOST)
    return inner.replace("<section>", '<section class="trouble">', 1) if is_bad else inner


def _in_short(facts: Facts, told: Told) -> list[tuple[str, str]]:
    status, plan = facts.status, facts.plan
    rows: list[tuple[str, object]] = []
    if status is not None:
        gpus = gpus_of(plan, status)
        code = status.code if status.state in FINAL else None
        rows += [("Exit code", "" if code is None else code), ("Took", _took(status, told.now))]
        rows += [("Started", _time(status.started_at)), ("Ended", _time(status.ended_at))]
        rows += [("GPUs", ", ".join(status.devices or gpus) or "none"), ("Processes", nproc_of(status))]
    rows += [("Host", told.host), ("Folder", told.folder)]
    if facts.metrics is not None:
        rows += _numbers(facts.metrics)
    if facts.outcome is not None and facts.outcome.export:
        rows.append(("Exported to", facts.outcome.export))
    return [(name, text(value)) for name, value in rows if value != ""]


def _numbers(metrics: Metrics) -> list[tuple[str, object]]:
    """The last step, the lowest losses, the median speeds."""
    rows: list[tuple[str, object]] = []
    last = max((series.steps[-1] for series in metrics.series.values() if series.steps), default=None)
    rows.append(("Last step", "" if last is None else f"{last:,.0f}"))
    for key, words in (("loss", "Lowest loss"), ("eval_loss", "Lowest held-out loss")):
        if values := _finite(metrics.get(key)):
            step, lowest = min(values, key=lambda point: point[1])
            rows.append((words, f"{number(lowest)} at step {step:,.0f}"))
    for key, words in (("tokens_per_s_per_gpu", "Tokens per second and process"), ("mfu", "MFU")):
        if values := _finite(metrics.get(key)):
            middle = sorted(value for _, value in values)[len(values) // 2]
            rows.append((words, f"{middle:.1%}" if key == "mfu" else number(middle)))
    return rows


def _finite(series: Series) -> list[tuple[float, float]]:
    return [(step, value) for step, value in series if abs(value) <= LARGEST]


def _curves(metrics: Metrics | None) -> str:
    if metrics is None:
        return ""
    wanted = [(title, [key for key in keys if key in metrics.keys]) for title, keys in CHARTS]
    drawn = [(title, keys) for title, keys in wanted if keys] or [(key, [key]) for key in metrics.keys[:MOST_CHARTS]]
    scale = scale_of("step", 0.0)
    charts = []
    for title, keys in drawn:
        curves: dict[str, Points] = {key: list(metrics.get(key)) for key in keys}
        svg = svg_chart(curves, x_name=scale.name, title=title)
        values = _finite(metrics.get(keys[0]))
        note = f"last {text(number(values[-1][1]))}" if values else ""
        charts.append(chart(title, svg, legend=svg_legend(keys), note=note))
    others = [key for key in metrics.keys if not any(key in keys for _, keys in drawn)]
    rows = [[text(key), text(number(metrics.get(key).last))] for key in others]
    more = folded("Other numbers, as they were last", table(("Key", "Last"), rows, numbers=(1,)))
    cut = "<p>The beginning of metrics.jsonl is left out: it is too long.</p>" if metrics.is_cut else ""
    return f'{cut}<div class="charts">{"".join(charts)}</div>{more}'


def _samples(samples: Sequence[Sample]) -> str:
    """The samples of the last step; those of earlier steps are folded."""
    if not samples:
        return ""
    by_step: dict[int | None, list[Sample]] = {}
    for sample in samples:
        by_step.setdefault(sample.step, []).append(sample)
    *earlier, last = by_step.items()
    inner = "".join(folded(_step_name(step), _quotes(found)) for step, found in reversed(earlier[-20:]))
    return f"<h3>{_step_name(last[0])}</h3>{_quotes(last[1])}{inner}"


def _step_name(step: int | None) -> str:
    return "Without a step" if step is None else f"Step {step:,}"


def _quotes(samples: Sequence[Sample]) -> str:
    parts = []
    for sample in samples[:20]:
        said = "<br>".join(text(line) for line in sample.text.split("\n")[:60]) or "(nothing)"
        asked = "<br>".join(text(line) for line in sample.prompt.split("\n")[:20])
        parts.append(f'<blockquote><div class="sub">{asked}</div><p>{said}</p></blockquote>')
    return "".join(parts)


def _profile(profile: Profile) -> str:
    rows = []
    for share in profile.shares[:50]:
        width = max(0.0, min(100.0, share.percent)) if abs(share.percent) <= LARGEST else 0.0
        bar = f'<div class="bar"><i style="width:{width:.1f}%"></i></div>'
        rows.append([text(share.name), f"{share.ms:,.2f}", f"{share.percent:.1f} %", f"{share.calls:,}", bar])
    where = "on the device" if profile.on_device else "by operator"
    title = f"<h3>Step {profile.step:,} of rank {profile.rank}, {where}: {profile.span_ms:,.1f} ms</h3>"
    return title + table(("", "ms", "of the step", "calls", ""), rows, numbers=(1, 2, 3))


def _config(facts: Facts) -> list[str]:
    parts = []
    request = facts.plan.request if facts.plan is not None else None
    if request is not None and request.command:
        torchrun = "torchrun " if request.torchrun else ""
        parts.append(f"<h3>Program</h3>{lines(torchrun + shlex.join(request.command))}")
    settings = [setting(override) for override in request.overrides] if request is not None else []
    if facts.config is None:
        parts.append(_values("Settings that are not the default", dict(settings)))
        return parts
    parts.append(_values("Given, or not the default", facts.config.changed))
    every = "\n".join(f"{key}: {_plain(value)}" for key, value in facts.config.values.items())
    parts.append(folded(f"All {len(facts.config.values)} keys, as they were resolved", lines(every)))
    return parts


def _values(title: str, values: Mapping[str, object]) -> str:
    rows = [[f"<code>{text(key)}</code>", f"<code>{text(_plain(value))}</code>"] for key, value in values.items()]
    return f"<h3>{title}</h3>{table(('Key', 'Value'), rows)}" if rows else ""


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _attempts(status: Status | None) -> str:
    if status is None or (len(status.attempts) < 2 and status.attempt < 2):
        return ""
    rows = []
    for one in status.attempts[-100:]:
        why = "; ".join([one.reason or one.error, *one.causes])
        rows.append(
            (one.attempt, one.state, one.step, one.resumed_from, _took_between(one.started_at, one.ended_at), why)
        )
    if status.attempt and all(one.attempt != status.attempt for one in status.attempts):
        rows.append((status.attempt, status.state, None, status.resumed_from, "", status.reason))
    shown_rows = [["" if cell is None else text(cell) for cell in row] for row in rows]
    return table(("", "Ended", "At step", "Began at step", "Took", "Why"), shown_rows, numbers=(2, 3))


def _environment(facts: Facts, told: Told) -> list[tuple[str, str]]:
    rows: list[tuple[str, object]] = list(told.environment)
    if facts.git is not None and facts.git.commit:
        branch = f" on {facts.git.branch}" if facts.git.branch else ""
        rows.append(("Git commit", f"{facts.git.commit[:12]}{branch}"))
        rows.append(("Uncommitted changes", _changes(facts)))
    if facts.plan is not None:
        rows += [
            ("Environment variables", ", ".join(facts.plan.env_names)),
            ("Secrets", ", ".join(facts.plan.secret_names)),
        ]
        rows.append(("Launched", _time(facts.plan.created)))
    return [(name, text(value)) for name, value in rows if value != ""]


def _changes(facts: Facts) -> str:
    if facts.git is None or not facts.git.dirty:
        return "none"
    patch = facts.patch
    if patch is None:
        return "some"
    return f"{counted(patch.files, 'file')}, {counted(patch.added, 'line')} added, {patch.removed:,} removed"


def _took(status: Status | None, now: datetime | None) -> str:
    if status is None or status.started_at is None:
        return ""
    if status.state in FINAL:
        return _took_between(status.started_at, status.ended_at)
    begun = _parsed(status.started_at)
    return "" if begun is None or now is None else f"{_duration((now - begun).total_seconds())} so far"


def _took_between(start: str | None, end: str | None) -> str:
    begun, ended = _parsed(start), _parsed(end)
    return "" if begun is None or ended is None else _duration((ended - begun).total_seconds())


def _duration(seconds: float) -> str:
    """`1 h 05 m`, `3 m 20 s`, `12 s`."""
    whole = max(0, round(seconds))
    if whole >= 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 60} m {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def _parsed(time: str | None) -> datetime | None:
    """A time; without a zone it counts as UTC, like all our times."""
    try:
        found = datetime.fromisoformat((time or "").replace("Z", "+00:00"))
        return found.replace(tzinfo=timezone.utc) if found.tzinfo is None else found.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def _time(stamp: str | None) -> str:
    found = _parsed(stamp)
    return found.strftime("%Y-%m-%d %H:%M:%S UTC") if found is not None else ""
