"""The screen of `top` as lines for a terminal of a given size: the job, its host's GPUs, curves, the end of the log and
the keys. Pure: all values are arguments.
"""

from __future__ import annotations

from typing import NamedTuple

from deployer import terminal
from deployer.agent.gpus.view import GpuLoad
from deployer.agent.job.views import Row
from deployer.commands.in_words import live_state
from deployer.commands.rows import duration, seconds_left, style_of_state
from deployer.curves.draw import LEAST_HEIGHT, LEAST_WIDTH, draw_curve
from deployer.curves.metrics import Metrics, Series
from deployer.errors import FerryError
from deployer.fullscreen import Line, Part
from deployer.printable import shown, shown_lines

STALE_S = 6.0
"""A host that has sent nothing for this long is shown as silent."""
CURVES = (("loss", "loss"), ("tokens/s", "tokens_per_s_per_gpu"), ("tokens/s", "tokens_per_s"))
BAR = 10
LEAST_LOG = 3
BESIDE_WIDTH = 80
"""Columns of a terminal from which two curves stand beside each other."""


class View(NamedTuple):
    """The known values of the job on the screen."""

    job_id: str
    where: str
    row: Row | None = None
    gpus: tuple[GpuLoad, ...] = ()
    no_gpus: str = ""
    metrics: Metrics = Metrics()
    log: str = ""
    trouble: str = ""
    silent_s: float = 0.0
    number: int = 1
    """The position of the job among `jobs`, from 1."""
    jobs: int = 1
    word: str = ""
    """Shown instead of the keys: a question, or the progress or result of a command."""
    is_question: bool = False


def lines_of(view: View, width: int, height: int) -> list[Line]:
    """`height` lines, of which the last one has the keys."""
    top = [*_head(view, width), *_gpus(view, width, most=max(1, (height - 4) // 3))]
    foot = _foot(view, width)
    left = height - len(top) - 1
    curves = _curves(view, width, min(left - LEAST_LOG - 1, left * 3 // 5)) if left > 0 else []
    log = _log(view, left - len(curves))
    body = [*top, *curves, *log][: height - 1]
    return [*body, *([(Part(shown("")),)] * (height - 1 - len(body))), foot]


# --- its parts --------------------------------------------------------------------------------------------------------


def _head(view: View, width: int) -> list[Line]:
    row = view.row
    title: list[Part] = [Part(shown(view.job_id), "bold"), Part(shown("  "))]
    if row is None:
        title.append(Part(shown("asking its host"), "dim"))
    else:
        title.append(Part(shown(live_state(row)), style_of_state(row.state)))
        title.append(Part(shown(f"  {view.where}"), "dim"))
    lines: list[Line] = [title]
    if row is not None:
        told = " ".join(filter(None, [row.command or row.name, f"({row.reason})" if row.reason else ""]))
        facts = [
            f"step {row.step}{'' if row.steps is None else f'/{row.steps}'}" if row.step is not None else "",
            f"loss {row.loss:.4g}" if row.loss is not None else "",
            f"ran {duration(row.ran_s)}" if row.ran_s is not None else "",
            f"{duration(left_s)} left" if (left_s := seconds_left(row)) is not None else "",
            told,
        ]
        lines.append((Part(shown("  ".join(filter(None, facts)))),))
    if view.trouble or view.silent_s > STALE_S:
        age = f"as {terminal.age(view.silent_s)} ago; " if row is not None else ""
        why = view.trouble or "its host is silent"
        lines.append((Part(shown(f"{age}{why}; trying again"), "magenta"),))
    return lines


def _gpus(view: View, width: int, *, most: int) -> list[Line]:
    if not view.gpus:
        return [(Part(shown(f"GPUs: {view.no_gpus}"), "dim"),)] if view.no_gpus else []
    own = view.row.gpus if view.row is not None else ()
    # the GPUs of the job come first
    gpus = sorted(view.gpus, key=lambda gpu: gpu.label not in own)
    lines = [_gpu(gpu, width, own=gpu.label in own) for gpu in gpus[:most]]
    if len(gpus) > most:
        lines[-1] = (Part(shown(f"{len(gpus) - most + 1} more GPUs"), "dim"),)
    return lines


def _gpu(gpu: GpuLoad, width: int, *, own: bool) -> Line:
    use = None if gpu.use_percent is None else min(max(gpu.use_percent, 0.0), 100.0)
    parts = [Part(shown(f"GPU {gpu.label}{'*' if own else ' '} "), "bold" if own else "")]
    if use is not None:
        if width >= 60:
            full = round(BAR * use / 100)
            bar, rest = ("█", "░") if terminal.is_unicode() else ("#", ".")
            parts.append(Part(shown(bar * full + rest * (BAR - full) + " "), "green" if own else "dim"))
        parts.append(Part(shown(f"{use:3.0f} %  ")))
    if gpu.memory_used_mib is not None and gpu.memory_total_mib is not None:
        parts.append(Part(shown(f"{gpu.memory_used_mib / 1024:.1f}/{gpu.memory_total_mib / 1024:.0f} GiB  ")))
    if gpu.power_w is not None:
        limit = f"/{gpu.power_limit_w:.0f}" if gpu.power_limit_w is not None else ""
        parts.append(Part(shown(f"{gpu.power_w:.0f}{limit} W  ")))
    if gpu.temperature_c is not None:
        parts.append(Part(shown(f"{gpu.temperature_c:.0f} °C  ")))
    parts.append(Part(shown(gpu.name), "dim"))
    return parts


def _curves(view: View, width: int, room: int) -> list[Line]:
    """The curves beside each other, one above the other, or only the first; without room for one, the last values."""
    found = {name: series for name, key in CURVES if (series := view.metrics.get(key)).is_drawable}
    if not found:
        said = "no metrics yet" if view.row is not None else ""
        return [(Part(shown(said), "dim"),)]
    if room < LEAST_HEIGHT + 1 or width < LEAST_WIDTH:
        last = [f"{name} {terminal.number(series.last)}" for name, series in found.items()]
        return [(Part(shown("  ".join(last))),)]
    if len(found) > 1 and width >= BESIDE_WIDTH:
        half = (width - 2) // 2
        sides = [_curve(name, series, half, room) for name, series in found.items()]
        return [_beside(left, right, half) for left, right in zip(*sides, strict=True)]
    if len(found) > 1 and room >= 2 * (LEAST_HEIGHT + 1):
        return [(part,) for name, series in found.items() for part in _curve(name, series, width, room // 2)]
    name, series = next(iter(found.items()))
    return [(part,) for part in _curve(name, series, width, room)]


def _curve(name: str, series: Series, width: int, height: int) -> list[Part]:
    """A curve in `height` lines, with its name and last value above it."""
    title = Part(shown(f"{name} {terminal.number(series.last)}"), "bold")
    plain = not terminal.is_unicode()
    try:
        drawn = draw_curve({name: series}, width, height - 1, colour=False, plain=plain)
    except FerryError as error:
        drawn = [error.message]
    lines = [title, *(Part(shown(line), "cyan") for line in drawn)][:height]
    return [*lines, *([Part(shown(""))] * (height - len(lines)))]


def _beside(left: Part, right: Part, width: int) -> Line:
    return (left, Part(shown(" " * (width + 2 - len(left.text)))), right)


def _log(view: View, room: int) -> list[Line]:
    if room < 2:
        return []
    lines = shown_lines(view.log) if view.log else []
    if not lines:
        return [(Part(shown("no log yet"), "dim"),)] if view.row is not None else []
    return [(Part(shown("log"), "bold"),), *((Part(line),) for line in lines[-(room - 1) :])]


def _foot(view: View, width: int) -> Line:
    if view.word:
        if view.is_question:
            return (Part(shown(view.word if len(view.word) <= width else "stop it? y/n"), "bold yellow"),)
        return (Part(shown(view.word), "yellow"),)
    jobs = f"↑↓ job {view.number}/{view.jobs}  " if view.jobs > 1 else ""
    if not terminal.is_unicode():
        jobs = jobs.replace("↑↓", "j k")
    return (Part(shown(f"q quit  {jobs}s stop  f pull"), "reverse"),)
