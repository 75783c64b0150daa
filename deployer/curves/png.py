"""Curves as a PNG file, drawn by matplotlib, which is an optional dependency."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO

from deployer.curves.points import Points
from deployer.errors import UsageError


def png_of(charts: Mapping[str, Mapping[str, Points]], *, x_name: str) -> bytes:
    """The bytes of the file: one chart for each key, one below the other, with its curves by name."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            f"--png needs matplotlib: {error}",
            hint="pip install 'torchferry[plot]', or --html FILE, which needs nothing",
        ) from None
    figure = Figure(figsize=(8, 3.2 * len(charts)), dpi=120, layout="constrained")
    for axes, (key, curves) in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts.items(), strict=True):
        for name, points in curves.items():
            few = "o" if len(points) <= 30 else None
            # matplotlib leaves names that begin with _ out of the legend, and reads $ as mathematics
            label = "\u200b" + name.replace("$", r"\$")
            axes.plot(
                [x for x, _ in points], [y for _, y in points], label=label, linewidth=1.4, marker=few, markersize=3
            )
        axes.set_ylabel(key.replace("$", r"\$"))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(curves) > 1 or list(curves) != [key]:
            axes.legend(frameon=False)
        axes.set_xlabel(x_name)
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
