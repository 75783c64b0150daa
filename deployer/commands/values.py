"""Parses words of the command line: sizes, durations, times, ports, GPUs, paths and assignments."""

from __future__ import annotations

import posixpath
import re
from datetime import datetime, time, timedelta
from typing import Any, NamedTuple

import click

from deployer.errors import UsageError


def parse_size(text: str) -> int:
    """The bytes in `500MB`, `2GB`, `1.5G` or `1000`; as a limit, 0 means no limit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)[bB]?", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="write a size such as 500MB or 2GB")
    factor = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}[match.group(2).lower()]
    size = float(match.group(1)) * factor
    if size >= 1 << 63:
        raise UsageError(f"{text!r} is more than any disk holds", hint="for a limit 0 means none")
    return int(size)


def parse_duration(text: str) -> float:
    """The seconds in `90s`, `10m`, `1h30m` or `2d`; only `0` needs no unit."""
    text = text.strip()
    if re.fullmatch(r"[1-9]\d*(\.\d+)?|0+\.\d+", text):
        raise UsageError(f"{text!r} has no unit", hint=f"write {text}s, {text}m, {text}h or {text}d")
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", "0s" if text == "0" else text)
    if match is None or not any(match.groups()):
        raise UsageError(f"{text!r} is not a duration", hint="write a duration such as 90s, 10m, 1h30m or 2d")
    seconds = sum(float(number or 0) * unit for number, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True))
    if seconds > 36500 * 86400:
        raise UsageError(f"{text!r} is longer than a hundred years")
    return seconds


class Ports(NamedTuple):
    """The two ends of a tunnel."""

    local: int
    remote: int


def parse_ports(text: str) -> Ports:
    """`8888`: the same port on both sides; `9000:8888`: 9000 here, 8888 there; `0:8888`: any free port here."""
    match = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", text.strip())
    hint = "for example 8888, or 9000:8888, which is 9000 here and 8888 there"
    if match is None:
        raise UsageError(f"{text!r} is no port", hint=hint)
    ports = Ports(int(match[1] or match[2]), int(match[2]))
    if max(ports) > 65535 or not ports.remote:
        raise UsageError(
            f"{text!r} is no port: they go from 1 to 65535, and 0 before a colon is any free one", hint=hint
        )
    return ports


def parse_since(text: str, *, now: datetime | None = None) -> dict[str, float]:
    """A time for the host: `ago_s` for a duration (`10m`), `unix_s` for a time (`14:30`, `2026-01-31T14:30`, `…Z`)."""
    if re.fullmatch(r"[\d.]+[dhms\d.]*", text.strip()):
        return {"ago_s": parse_duration(text)}
    now = now or datetime.now().astimezone()
    try:
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text.strip()):
            moment = datetime.combine(now, time.fromisoformat(text.strip().zfill(5)), now.tzinfo)
            return {"unix_s": (moment if moment <= now else moment - timedelta(days=1)).timestamp()}
        return {"unix_s": datetime.fromisoformat(text.strip().replace("Z", "+00:00")).timestamp()}
    except ValueError:
        hint = "for example 10m, 2h, 14:30 or 2026-01-31T14:30"
        raise UsageError(f"--since {text!r} is neither a duration nor a time", hint=hint) from None


def parse_gpus(text: str) -> list[int | str]:
    """The GPUs in `0,2`, `auto:2` or UUIDs; the rules of target.gpu_ranks check them later."""
    return [_gpu(word.strip()) for word in text.split(",")]


def _gpu(text: str) -> int | str:
    if span := re.fullmatch(r"(\d{1,2})-(\d{1,2})", text):
        each = ",".join(map(str, range(int(span[1]), int(span[2]) + 1)))
        raise UsageError(f"{text} is a range, and each GPU must be named", hint=f"write {each}")
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return text


def parse_path(text: str) -> str:
    """A path in normal form: `./out/` becomes `out`."""
    return posixpath.normpath(text) if text else text


def parse_assignment(text: str) -> tuple[str, str]:
    """The name and the value of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        hint = "a name has letters, digits and _, and no digit comes first"
        if name.isidentifier():
            hint = f"write {name}=VALUE, or use --secret {name}, which takes the value from your shell"
        raise UsageError(f"{text!r} is not of the form NAME=VALUE", hint=hint)
    return name, value


class Seconds(click.FloatRange):
    """A number of seconds, at most a year, so that every timer accepts it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not seconds <= 365 * 86400:  # rejects NaN too
            self.fail(f"{seconds:g} is not a number of seconds up to a year.", param, ctx)
        return seconds
