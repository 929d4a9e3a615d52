"""Draws report.svg, the top of a report and its charts, from the page of a run.

compiled-attn run --backend eager --requests 24 --scale 0.25 --report /tmp/report
python docs/pictures/report.py /tmp/report/report.html > docs/pictures/report.svg
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

WIDTH, LEFT, TILE = 680, 16, 110
FACTS = ("graphs", "compiles after warmup", "requests", "generated tokens", "tokens per second",
         "preemptions")  # fmt: skip


def picture(page: str) -> str:
    """Return the title, some single values and all charts of a page as an SVG in light colours."""
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", page))
    parts = [text(LEFT, 28, re.findall(r"<h1>(.*?)</h1>", page)[0], 17)]
    for at, name in enumerate(FACTS):
        x = LEFT + TILE * at
        box = f'x="{x}" y="42" width="{TILE - 4}" height="46"'
        parts.append(f'<rect {box} fill="var(--card)" stroke="var(--grid)"/>')
        parts += [text(x + 8, 58, name, 9, "muted"), text(x + 8, 79, facts[name], 14)]
    y = 88.0
    charts = re.findall(
        r"<h2>([^<]*)</h2>\s*(?:<p[^<]*</p>\s*)?<figure[^>]*>(<svg.*?</svg>)", page, re.S
    )
    for letter, (title, chart) in zip("abcdefgh", charts, strict=False):
        head, _, body = chart.partition(">")
        width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)[0])
        # Identifiers are unique in one chart only.
        body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{letter}", body)
        place = f'x="{LEFT}" y="{y + 36:g}" width="{width:g}" height="{height:g}"'
        parts.append(text(LEFT, y + 24, title, 13))
        parts.append(f'<svg {place} viewBox="0 0 {width:g} {height:g}">{body}')
        y += 36 + height
    size = f'width="{WIDTH}" height="{y + 16:g}"'
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    font = 'font-family="system-ui, sans-serif"'
    charts = [
        f'<svg {spaces} viewBox="0 0 {WIDTH} {y + 16:g}" {size} {font}>',
        f'<rect {size} fill="var(--surface)"/>',
        *parts,
        "</svg>\n",
    ]
    light = dict(re.findall(r"--(\w+): (#\w+)", page.partition("@media")[0]))
    return re.sub(r"var\(--(\w+)\)", lambda name: light[name[1]], "\n".join(charts))


def text(x: float, y: float, words: str, size: int, colour: str = "text") -> str:
    """Return a line of text; only the muted one is not bold."""
    weight = 400 if colour == "muted" else 600
    style = f'font-size="{size}" font-weight="{weight}" fill="var(--{colour})"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


if __name__ == "__main__":
    print(picture(Path(sys.argv[1]).read_text()), end="")
