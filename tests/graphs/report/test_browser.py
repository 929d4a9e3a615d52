"""The page in a real browser: no complaint, no request, nothing cut off, light and dark."""

from __future__ import annotations

import pytest

from graphs.report import write_report
from tests.chromium import Chromium, find_chromium

pytest.importorskip("matplotlib", reason="needs the extra report")

BUCKETS = [
    {
        "bucket": f"tokens={tokens} shared=0 unique={unique} logits=32",
        "status": "failed" if tokens + unique == 320 else "captured",
        "steps": steps,
        "waste": 0.3 if steps else None,
        "warmup_seconds": 0.5 + tokens / 100,
        "step_ms": {"p50": tokens / 9, "p99": tokens / 5, "max": tokens * 1.1},
        "error": "boom",
    }
    for steps, (tokens, unique) in enumerate((t, u) for t in (8, 64, 512) for u in (256, 2048))
]
REPORT = {
    "graphs": 5,
    "compiles_after_warmup": 0,
    "torch": "2.13.0+cpu",
    "padding_waste": {"tokens": 0.04, "blocks": 0.67},
    "buckets": BUCKETS,
    "series": [
        {
            "title": "Blocks of the cache",
            "x": [i / 100 for i in range(2000)],
            "x_label": "seconds",
            "y_label": "blocks",
            "lines": {"in use": [i % 700 for i in range(2000)], "highest": [700] * 2000},
            "limit": 1023,
        }
    ],
}
LABELS_OVERLAP = """
[...document.querySelectorAll('figure svg')].some(svg => ['xtick', 'ytick'].some(kind => {
  const ticks = [...svg.querySelectorAll(`[id^=${kind}] text`)];
  const boxes = ticks.map(text => text.getBoundingClientRect());
  return boxes.some((a, i) => boxes.slice(i + 1).some(b =>
    a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom));
}))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    binary = find_chromium()
    if binary is None:
        pytest.skip("needs Chromium or Chrome: apt-get install chromium")
    with Chromium(binary, tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("report"), REPORT, title="A run")


def luminance(browser, place, what):
    """As WCAG defines it, of the first element at `place`."""
    text = browser.value(f"getComputedStyle(document.querySelector('{place}')).{what}")
    parts = (int(part) / 255 for part in text[text.index("(") + 1 : -1].split(",")[:3])
    linear = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "phone"), [(1280, False), (360, True)], ids=["desktop", "phone"])
def test_the_page_is_readable_and_silent(browser, page, width, phone, dark, tmp_path):
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(page, width=width, dark=dark, phone=phone)
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("parseFloat(getComputedStyle(document.body).fontSize)") >= 14
    assert browser.value(LABELS_OVERLAP) is False
    ground = luminance(browser, "section", "backgroundColor")
    assert ground < 0.05 if dark else ground > 0.9
    for place in (".facts dt", ".facts dd", ".lead", "th", "td", "figure text"):
        ink = luminance(browser, place, "fill" if place == "figure text" else "color")
        assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.5, place
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_each_chart_is_drawn(browser, page):
    browser.open(page, width=1280, dark=False, phone=False)

    def count(selector):
        return browser.value(f"document.querySelectorAll('{selector}').length")

    assert count("figure svg") == 3
    assert count("figure svg [id^=mark]") == 6  # never hit and not captured included
    assert count("figure svg [id^=mark] title") == 6
    marks = "[...document.querySelectorAll('[id^=mark] use')]"
    assert browser.value(f"{marks}.every(m => m.getBoundingClientRect().width >= 6)")
    box = "[...document.querySelectorAll('figure svg')].pop().getBoundingClientRect()"
    assert browser.value(f"{box}.width") > 400 and browser.value(f"{box}.height") > 50


def test_the_browser_would_notice_a_complaint_and_a_request(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='missing.png'><script>console.error('bad'); nothing()</script>")
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(bad, width=800, dark=False, phone=False)
    assert len(browser.requests) == 2
    assert any("bad" in text for text in browser.complaints)
    assert any("ReferenceError" in text for text in browser.complaints)
