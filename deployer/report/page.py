"""The HTML page of a report: its style, and the escaping of text. The page loads nothing and runs no scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from deployer.printable import shown, shown_lines

MOST_TEXT = 200_000
"""Characters of one text; of a longer text, only the beginning and the end are shown."""


def text(value: object, most: int = 2000) -> str:
    """A value as escaped text in one line."""
    return escape(_cut(shown(value), most))


def lines(value: str, most: int = MOST_TEXT) -> str:
    """A text with its line breaks, in a box that scrolls."""
    return f"<pre>{escape(_cut(chr(10).join(shown_lines(value.expandtabs(4))), most))}</pre>"


def _cut(value: str, most: int) -> str:
    if len(value) <= most:
        return value
    return f"{value[: most // 2]} … {len(value) - most:,} characters are left out … {value[-most // 2 :]}"


def section(title: str, *parts: str) -> str:
    """A part of the page; empty without content."""
    inner = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inner}\n</section>" if inner else ""


def folded(title: str, inner: str) -> str:
    """A part of the page that is closed until the reader opens it."""
    return f"<details><summary>{escape(title)}</summary>\n{inner}\n</details>" if inner else ""


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values; the values are HTML."""
    inner = "\n".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in rows if value)
    return f"<dl>\n{inner}\n</dl>" if inner else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table; the cells are HTML. `numbers`: the indices of right-aligned columns."""
    if not rows:
        return ""
    side = ['class="n"' if number in numbers else "" for number in range(len(columns))]
    head = "".join(f"<th {side[n]}>{escape(column)}</th>" for n, column in enumerate(columns))
    body = "\n".join(f"<tr>{''.join(f'<td {side[n]}>{cell}</td>' for n, cell in enumerate(row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def chart(title: str, svg: str, *, legend: str = "", note: str = "") -> str:
    more = f' <span class="note">{note}</span>' if note else ""
    return f"<figure><figcaption>{escape(title)}{more}</figcaption>\n{legend}\n{svg}\n</figure>"


def page(title: str, head: str, body: Iterable[str], foot: str) -> str:
    """The complete file. Its content security policy lets a browser load nothing, whatever the file contains."""
    inner = "\n".join(part for part in body if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(shown(title))}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
{head}
</header>
{inner}
</main>
<footer>{foot}</footer>
</body>
</html>
"""


STYLE = """
:root {
  --back: #f6f7f9; --card: #fff; --text: #1c2128; --dim: #636c76; --line: #dde1e6; --soft: #f0f2f5;
  --good: #1a7f37; --bad: #c2281d; --busy: #0a66c2; --warn: #9a6700;
  --c0: #2563c9; --c1: #d9640b; --c2: #2a8c4a; --c3: #a33bb5;
  --c4: #b08900; --c5: #0c8f9c; --c6: #cf2f4e; --c7: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #0f1318; --card: #171c23; --text: #e3e8ee; --dim: #96a0ab; --line: #2b323b; --soft: #1e242c;
    --good: #4cc26b; --bad: #ff7b70; --busy: #5fa8ff; --warn: #dfb042;
    --c0: #6aa5ff; --c1: #ff9b4a; --c2: #56c878; --c3: #d68be4;
    --c4: #e3bd45; --c5: #45c9d6; --c6: #ff7f96; --c7: #9aa4af;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main, footer { max-width: 1080px; margin: 0 auto; padding: 0 20px; }
header { padding: 32px 0 8px; }
h1 { margin: 0 0 6px; font-size: 26px; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 0 0 14px; font-size: 17px; }
h3 { margin: 18px 0 8px; font-size: 14px; color: var(--dim); font-weight: 600; }
p { margin: 0 0 10px; }
section {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px; margin: 16px 0;
}
.sub { color: var(--dim); overflow-wrap: anywhere; }
.state {
  display: inline-block; padding: 2px 11px; border-radius: 99px; border: 1px solid currentColor;
  font-size: 14px; font-weight: 600; margin-right: 10px;
}
.good { color: var(--good); } .bad { color: var(--bad); } .busy { color: var(--busy); } .warn { color: var(--warn); }
section.trouble { border-left: 4px solid var(--bad); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 14px 22px; margin: 0; }
dt { color: var(--dim); font-size: 13px; }
dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 22px 26px;
  align-items: end; }
.charts.single { grid-template-columns: minmax(0, 820px); }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 4px; }
.note { color: var(--dim); font-weight: 400; }
svg.chart { display: block; width: 100%; height: auto; }
svg.chart text { fill: var(--dim); font-size: 12px; font-variant-numeric: tabular-nums; }
svg.chart path { fill: none; }
svg.chart .grid { stroke: var(--line); }
svg.chart .axis { stroke: var(--dim); }
svg.chart .line { stroke-width: 1.7; stroke-linejoin: round; }
.c0 { --mine: var(--c0); } .c1 { --mine: var(--c1); } .c2 { --mine: var(--c2); } .c3 { --mine: var(--c3); }
.c4 { --mine: var(--c4); } .c5 { --mine: var(--c5); } .c6 { --mine: var(--c6); } .c7 { --mine: var(--c7); }
.line { stroke: var(--mine); } .dot { fill: var(--mine); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 4px; font-size: 13px; color: var(--dim); }
.legend i { display: inline-block; width: 16px; height: 3px; border-radius: 2px; background: var(--mine);
  vertical-align: middle; margin-right: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--dim); font-weight: 500; font-size: 13px; }
th, td { padding: 5px 16px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
th:last-child, td:last-child { padding-right: 0; }
tbody tr:last-child td { border-bottom: 0; }
th:first-child:not(:last-child) { min-width: 170px; width: 30%; }
th.n, td.n { text-align: right; white-space: nowrap; }
.bar { background: var(--soft); border-radius: 3px; min-width: 120px; height: 9px; margin-top: 7px; }
.bar i { display: block; height: 100%; border-radius: 3px; background: var(--c0); }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre {
  background: var(--soft); border-radius: 8px; padding: 12px 14px; margin: 0; overflow: auto; max-height: 440px;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--dim); font-size: 14px; margin-bottom: 8px; }
blockquote { margin: 0 0 14px; padding: 2px 0 2px 14px; border-left: 3px solid var(--line); }
blockquote .sub { font-size: 13px; }
blockquote p { white-space: pre-wrap; overflow-wrap: anywhere; margin: 2px 0 6px; }
footer { color: var(--dim); font-size: 13px; padding-top: 6px; padding-bottom: 40px; }
@media print {
  :root { --back: #fff; --card: #fff; --text: #000; --dim: #444; --line: #ccc; --soft: #f5f5f5; color-scheme: light; }
  body { font-size: 11pt; }
  main, footer { max-width: none; padding: 0; }
  section { break-inside: avoid-page; border-radius: 0; border-width: 1px 0 0; padding: 12px 0; margin: 0; }
  pre { max-height: none; }
  figure, tr { break-inside: avoid; }
}
"""
