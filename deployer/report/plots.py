"""Curves of several runs as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployer.curves.along import Scale
from deployer.curves.points import Points
from deployer.curves.svg import svg_chart, svg_legend
from deployer.report.page import chart, page, section, table, text


def page_of_charts(
    charts: Mapping[str, Mapping[str, Points]], scale: Scale, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """A page with one chart for each title, and a table below."""
    drawn = [
        chart(
            title,
            svg_chart(curves, x_name=scale.name, title=title, whole_x=scale.whole),
            legend=svg_legend(list(curves)),
            note="" if len(curves) > 1 or title in curves else text(next(iter(curves))),
        )
        for title, curves in charts.items()
    ]
    names = list(dict.fromkeys(row[0] for row in rows))
    title = f"{', '.join(charts)} of {names[0] if len(names) == 1 else f'{len(names)} runs'}"
    figures = f'<div class="charts single">{"".join(drawn)}</div>'
    cells = [[text(cell) for cell in row] for row in rows]
    body = [section("Curves", figures), section("Values", table(columns, cells, numbers=(2, 3, 4)))]
    return page(title, f"<h1>{text(title)}</h1>", body, "made by Torchferry")
