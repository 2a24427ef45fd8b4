"""The page of a report: HTML that needs no network, no script and no other file."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nanoinfer.batch.lines.errors import Errors
from nanoinfer.batch.report.charts import Chart, draw

UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # controls, and halves of characters

INSTALL = "To see pictures here, install a matplotlib that works: pip install matplotlib ({})."

PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px sans-serif; margin: 2em auto; width: 720px }} svg {{ display: block }}
figure {{ margin: 1.5em 0 }} h1 {{ font-size: 22px }} h2 {{ font-size: 18px; margin: 1.5em 0 0.5em }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px }}
th, td {{ text-align: left; vertical-align: top; padding: 4px 14px 4px 0; border-bottom: 1px solid #ddd }}
td {{ overflow-wrap: anywhere; min-width: 45px }} td:first-child {{ min-width: 130px }}
.number {{ text-align: right; width: 1% }} details {{ margin-top: 1em }}</style></head>
<body><h1>{title}</h1><p>{summary}</p>
{body}
</body></html>
"""


class Result(NamedTuple):
    """What the page shows of a result: the beginnings of its texts, and of its first sample its tokens and its end."""

    id: str
    prompt: str
    text: str
    tokens: int
    finish_reason: str


def make_page(title: str, summary: str, charts: Sequence[Chart], results: Sequence[Result], errors: Errors) -> str:
    """Return the whole page. It is text that UTF-8 can hold, whatever stands in the results."""
    parts = [_drawn(charts)] if charts else []
    if results:
        table = _table(("id", "prompt", "text", "tokens", "end"), results)
        parts += [f"<h2>The first {len(results)} results</h2>", table]
    if len(errors):
        table = _table(("kind", "errors", "the first of them"), errors.kinds())
        parts += [f"<h2>{len(errors):,} errors, by kind</h2>", table]
        items = "\n".join(f"<li>{_escaped(message)}</li>" for message in errors.messages)
        count = len(errors.messages)
        parts.append(f"<details><summary>The first {count} errors</summary>\n<ul>\n{items}\n</ul></details>")
    return PAGE.format(title=_escaped(title), summary=_escaped(summary), body="\n".join(parts))


def _drawn(charts: Sequence[Chart]) -> str:
    """Return the charts as a picture, or in words if matplotlib does not draw them."""
    try:
        return f"<figure>{draw(charts)}</figure>"
    except Exception as error:  # it is not installed, finds no place for its cache, or does not fit another package
        items = "\n".join(f"<li>{chart.headline}</li>" for chart in charts)
        return f"<ul>\n{items}\n</ul>\n<p>{_escaped(INSTALL.format(error))}</p>"


def _table(titles: Iterable[str], rows: Iterable[Iterable[str | int]]) -> str:
    """Return a table; numbers stand on the right of their cells."""
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _cell(value: str | int) -> str:
    return f"<td>{_escaped(value)}</td>" if isinstance(value, str) else f'<td class="number">{value:,}</td>'


def _escaped(text: str) -> str:
    r"""Return a text as HTML; what HTML cannot show, such as half a surrogate pair, as \ud800."""
    return html.escape(UNSHOWN.sub(lambda match: ascii(match[0])[1:-1], text))
