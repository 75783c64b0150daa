"""`plot`: draws the metrics of runs as curves, in the terminal, as a PNG file or as an HTML file."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deployer import terminal
from deployer.commands.look.run_files import (
    METRICS,
    FindHost,
    Run,
    locate,
    open_run,
    tell_source,
    tell_trouble,
)
from deployer.connection.host import Host
from deployer.curves.along import Along, Scale, points_along, scale_of
from deployer.curves.draw import draw_curve
from deployer.curves.metrics import Metrics
from deployer.curves.points import LARGEST, Points, smoothed
from deployer.errors import FerryError, UnknownJob, UsageError
from deployer.paths import write_whole
from deployer.printable import cells, shown

COLUMNS = "RUN", "KEY", "STEP", "FIRST", "LAST", "LOWEST"
DEFAULT_KEYS = ("loss", "eval_loss")
LEAST_HEIGHT, MOST_HEIGHT = 10, 24


@dataclass(frozen=True)
class PlotRequest:
    """What to draw, and in which form."""

    keys: tuple[str, ...] = ()
    along: Along = "step"
    smooth: int = 1
    png: str | None = None
    html: str | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Drawn:
    """A run with its metrics."""

    run: Run
    metrics: Metrics


Charts = dict[str, dict[str, Points]]
"""Charts by title; each has curves by name."""


def plot(words: Sequence[str], find_host: FindHost, wanted: PlotRequest) -> int:
    """Draws the runs. Returns 0, or the exit code of the first run that could not be drawn."""
    with tempfile.TemporaryDirectory(prefix="torchferry-plot-") as folder:
        drawn, failure = _read_all(words, find_host, Path(folder))
    if not drawn:
        raise failure or UnknownJob("no run to draw")
    keys = wanted.keys or _default_keys(drawn)
    _check_keys(keys, drawn)
    if wanted.as_json:
        terminal.say_json(_as_json(drawn, wanted))
    else:
        charts, scale = _charts(keys, drawn, wanted)
        if wanted.png is not None:
            from deployer.curves.png import png_of

            _write(wanted.png, png_of(charts, x_name=scale.name))
        if wanted.html is not None:
            from deployer.report.plots import page_of_charts

            page = page_of_charts(charts, scale, [column.capitalize() for column in COLUMNS], _summary(keys, drawn))
            _write(wanted.html, page.encode("utf-8", "replace"))
        if wanted.png is None and wanted.html is None:
            _show(charts, scale)
            terminal.say(shown(""))
            terminal.table(cells(*COLUMNS), [cells(*row) for row in _summary(keys, drawn)])
    return failure.exit_code if failure is not None else 0


def _read_all(words: Sequence[str], find_host: FindHost, folder: Path) -> tuple[list[Drawn], FerryError | None]:
    """Every run that has metrics (without words: the newest job), and the error of the first run that is missing. Runs
    on the same host share one Host."""
    asked: list[str | None] = [*dict.fromkeys(words)]
    found = [(word or "", locate(word, find_host)) for word in asked or [None]]
    hosts: dict[tuple[str | None, str], Host] = {}
    drawn: list[Drawn] = []
    failure: FerryError | None = None
    try:
        for number, (word, place) in enumerate(found):
            if not isinstance(place, Path):
                host, record = place
                place = hosts.setdefault((host.ssh, host.root), host), record
            try:
                run = open_run(word, place, [METRICS], folder / str(number))
                tell_source(run)
                drawn.append(Drawn(run, _metrics_of(run)))
            except UsageError:
                raise
            except FerryError as error:
                failure = failure or error
                if len(found) > 1:
                    tell_trouble(word, error)
    finally:
        for host in hosts.values():
            host.close()
    names = [one.run.name for one in drawn]
    return [one for number, one in enumerate(drawn) if one.run.name not in names[:number]], failure


def _metrics_of(run: Run) -> Metrics:
    metrics = run.metrics()
    if metrics is None or not metrics.keys:
        where = "" if metrics is None else f", and its {METRICS} holds no number"
        raise UnknownJob(
            f"{run.name} has written no metrics yet{where}",
            hint=f"a program writes one JSON object a line into $TORCHFERRY_RUN_DIR/{METRICS}: "
            '{"step": 1, "loss": 2.5}',
        )
    if metrics.is_cut:
        terminal.notice(shown(f"{run.name}: {METRICS} is so long that its beginning is left out"))
    if metrics.damaged:
        terminal.notice(
            shown(f"{run.name}: {terminal.counted(metrics.damaged, 'line')} of {METRICS} left out, damaged")
        )
    return metrics


def _default_keys(drawn: Sequence[Drawn]) -> tuple[str, ...]:
    """The losses; if no run has a loss, the first key that exists."""
    there = [key for one in drawn for key in one.metrics.keys]
    return tuple(key for key in DEFAULT_KEYS if key in there) or (there[0],)


def _check_keys(keys: Sequence[str], drawn: Sequence[Drawn]) -> None:
    there = list(dict.fromkeys(key for one in drawn for key in one.metrics.keys))
    for key in keys:
        if key not in there:
            raise UsageError(f"no run has a key {key!r} in its metrics", hint=f"keys: {', '.join(there[:40])}")


def _charts(keys: Sequence[str], drawn: Sequence[Drawn], wanted: PlotRequest) -> tuple[Charts, Scale]:
    """One chart for each key, with one curve for each run; the two losses of a single run share a chart."""
    curves: Charts = {}
    for key in keys:
        for one in drawn:
            if key not in one.metrics.keys:
                terminal.notice(shown(f"{one.run.name} has no {key}"))
                continue
            points = points_along(one.metrics, key, wanted.along)
            if points is None:
                raise UsageError(
                    f"the metrics of {one.run.name} do not tell of {wanted.along}", hint="--x step needs nothing else"
                )
            curves.setdefault(key, {})[one.run.name] = smoothed(points, wanted.smooth)
    largest = max((x for chart in curves.values() for points in chart.values() for x, _ in points), default=0.0)
    scale = scale_of(wanted.along, largest)
    told: Charts = {
        key: {name: [(x / scale.unit, y) for x, y in points] for name, points in chart.items()}
        for key, chart in curves.items()
    }
    if len(drawn) == 1 and tuple(told) == DEFAULT_KEYS:
        told = {"loss": {key: points for key, chart in told.items() for points in chart.values()}}
    return told, scale


def _show(charts: Charts, scale: Scale) -> None:
    canvas = terminal.canvas()
    height = min(max((canvas.height - 4) // len(charts) - 1, LEAST_HEIGHT), MOST_HEIGHT)
    for title, curves in charts.items():
        if len(curves) == 1:
            title = f"{title} of {next(iter(curves))}" if next(iter(curves)) != title else title
        terminal.say(shown(f"{title} by {scale.name}"))
        lines = draw_curve(curves, canvas.width, height, colour=canvas.colour, plain=canvas.plain, whole_x=scale.whole)
        terminal.drawing(lines)


def _summary(keys: Sequence[str], drawn: Sequence[Drawn]) -> list[tuple[str, str, str, str, str, str]]:
    """A row for each run and key: the last step, the first, last and lowest value, and the step of the lowest."""
    rows = []
    for one in drawn:
        for key in keys:
            points = [(step, value) for step, value in one.metrics.get(key) if abs(value) <= LARGEST]
            if points:
                step, lowest = min(points, key=lambda point: point[1])
                ends = (terminal.number(points[0][1]), terminal.number(points[-1][1]))
                at = f"{terminal.number(lowest)} at step {step:,.0f}"
                rows.append((one.run.name, key, f"{points[-1][0]:,.0f}", *ends, at))
    return rows


def _as_json(drawn: Sequence[Drawn], wanted: PlotRequest) -> dict[str, object]:
    """The runs as JSON, with all keys unless some are named."""
    runs = []
    for one in drawn:
        series = {key: points_along(one.metrics, key, wanted.along) for key in wanted.keys or one.metrics.keys}
        runs.append(
            {
                "id": one.run.name,
                "where": one.run.host.name if one.run.host is not None else None,
                "from": "host" if one.run.from_host else "here",
                "trouble": one.run.trouble or None,
                "series": {key: _plain(smoothed(points, wanted.smooth)) for key, points in series.items() if points},
            }
        )
    return {"x": wanted.along, "runs": runs}


def _plain(points: Points) -> list[list[float | None]]:
    return [[x, y if math.isfinite(y) else None] for x, y in points]


def _write(file: str, data: bytes) -> None:
    try:
        write_whole(Path(file), data)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}", hint="name another file") from None
    terminal.notice(shown(f"wrote {terminal.typed(file)}, {terminal.size(len(data))}"))
