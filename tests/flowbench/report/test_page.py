"""The HTML page in a real browser: no errors, no network, filters, keyboard, links, phones, dark mode, screen readers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowbench import report
from flowbench.record.document import document_text, parse_document

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="Playwright drives the browser: python -m pip install 'flowbench[dev]'"
)
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
).split()
SITUATIONS = [
    "two_cells", "nothing_measured", "no_cells", "two_ranks", "profiled", "with_history", "slower", "failed", "other_machine", "stray_context",
    "hostile_names", "explained",
]  # fmt: skip
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
TABLET, NARROW_DESK = {"width": 768, "height": 1024}, {"width": 1070, "height": 800}

Open = Any  # a function, with the complaints so far


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium as the system has it."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium is on the path: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def show(browser: Any, situations: dict[str, Any], tmp_path: Path) -> Iterator[Open]:
    """Opens a situation's page, or a text; at the end nothing may have been complained about or asked of the network."""
    complaints: list[str] = []
    contexts = []

    def opened(what: str, viewport: dict[str, int] = DESK, anchor: str = "", **options: Any) -> Any:
        made = situations.get(what)
        text = report.render(made.document, "html", comparison=made.comparison, history=made.history) if made else what
        file = tmp_path / f"page-{len(contexts)}.html"
        file.write_text(text, encoding="utf-8")
        contexts.append(browser.new_context(viewport=viewport, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on(
            "request", lambda request: None if request.url.startswith(file.as_uri()) else complaints.append(request.url)
        )
        page.goto(file.as_uri() + anchor)
        return page

    opened.complaints = complaints
    yield opened
    for context in contexts:
        context.close()
    assert [text for text in complaints if not text.startswith("data:")] == []


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_page_opens_without_a_complaint_on_a_desk_and_on_a_phone(show: Open, situation: str) -> None:
    for viewport, scheme in ((DESK, "light"), (PHONE, "dark"), (TABLET, "light"), (NARROW_DESK, "dark")):
        page = show(situation, viewport, color_scheme=scheme)
        assert page.locator("h1").inner_text().strip()
        for toggle in page.locator(".toggle").all()[:3]:
            toggle.click()
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= viewport["width"], f"{situation} is {wide} pixels wide"
        for heading in page.locator("th[scope=row]").all()[:3]:
            box = heading.bounding_box()
            assert box is None or box["height"] < 140, (
                f"{situation}: a cell's name is squeezed to {box['width']} pixels"
            )


def visible(page: Any) -> list[str]:
    """The engines of the cells that are shown."""
    return [row.get_attribute("data-engine") for row in page.locator("tr.row[data-engine]").all() if row.is_visible()]


def test_filters_leave_what_was_asked_for(show: Open) -> None:
    page = show("two_cells")
    assert visible(page) == ["Flow", "PyTorch-NHWC"] * 2
    assert page.locator("output").inner_text() == "all 4 cells"
    page.locator("select[name=engine]").select_option("Flow")
    assert visible(page) == ["Flow"] * 2
    assert page.locator("output").inner_text() == "2 of 4 cells"
    faded = page.locator("figure g[data-engine='PyTorch-NHWC']").first
    assert float(faded.evaluate("line => line.style.opacity")) < 0.5
    page.get_by_role("button", name="Show all").click()
    assert visible(page) == ["Flow", "PyTorch-NHWC"] * 2
    assert float(faded.evaluate("line => line.style.opacity")) == 1


def test_models_and_world_sizes_are_filters_too_and_hide_their_charts(show: Open, situations: dict[str, Any]) -> None:
    page = show("many_models")
    charts = page.locator("figure:visible").count()
    page.locator("select[name=model]").select_option("resnet18")
    assert visible(page) == ["Flow"] * 4
    assert 0 < page.locator("figure:visible").count() < charts
    page.locator("select[name=world]").select_option("2")
    assert visible(page) == ["Flow"] * 2
    assert all("2" in figure.get_attribute("data-worlds") for figure in page.locator("figure:visible").all())
    states = show("slower")
    states.locator("select[name=state]").select_option("slower")
    assert visible(states) == ["Flow head"] * 2


def test_the_keyboard_alone_is_enough(show: Open) -> None:
    page = show("two_cells")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.name") == "engine"
    page.keyboard.press("F")  # chooses the option that begins with it
    assert visible(page) == ["Flow"] * 2
    while page.evaluate("document.activeElement.className") != "toggle":
        page.keyboard.press("Tab")
    first = page.locator(".toggle").first
    assert first.get_attribute("aria-expanded") == "false"
    page.keyboard.press("Enter")
    assert first.get_attribute("aria-expanded") == "true"
    assert page.locator("tr.detail.open svg.strip").is_visible()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "what has the focus has to be seen"
    page.keyboard.press("Space")
    assert first.get_attribute("aria-expanded") == "false"


def test_a_link_to_a_cell_opens_it(show: Open, situations: dict[str, Any]) -> None:
    page = show("two_cells")
    anchors = [row.get_attribute("id") for row in page.locator("tr.row[id]").all()]
    assert len(set(anchors)) == 4
    page = show("two_cells", anchor=f"#{anchors[3]}")
    assert page.locator(f"#of-{anchors[3]}").is_visible()
    assert page.locator(f"#{anchors[3]}").evaluate("row => row.getBoundingClientRect().top < innerHeight")
    page.locator("select[name=engine]").select_option("Flow")
    page.evaluate(f"location.hash = '#{anchors[1]}'")  # a cell that the filter hides
    page.locator(f"#of-{anchors[1]}").wait_for(state="visible")
    changed = show("slower")
    changed.locator("section[aria-labelledby=changed] a").first.click()
    assert changed.locator("tr.detail.open").count() == 1


def test_links_to_cells_survive_other_cells_and_another_order(situations: dict[str, Any]) -> None:
    def anchors(document: Any) -> dict[str, str]:
        text = report.render(document, "html")
        return dict(re.findall(r'<tr class="row" role="row" id="(cell-[^"]+)".*?>([^<]*)</button>', text, re.DOTALL))

    whole = situations["two_cells"].document
    turned = dataclasses.replace(whole, cells=tuple(reversed(whole.cells)), run_id="another", created="2027-01-01")
    assert anchors(turned) == anchors(whole)
    keys = {cell.key for cell in whole.cells[3:]}
    fewer = dataclasses.replace(
        whole, cells=whole.cells[3:], samples=tuple(one for one in whole.samples if one.cell in keys)
    )
    assert anchors(fewer).items() < anchors(whole).items()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_its_ground(show: Open, dark: bool) -> None:
    page = show("slower", color_scheme="dark" if dark else "light")
    style = page.evaluate(
        "(() => { const of = getComputedStyle(document.documentElement); return Object.fromEntries("
        "['paper','ink','muted','accent','worse','better','unknown'].map(name => [name, of.getPropertyValue('--' + name).trim()])) })()"
    )
    assert (luminance(style["paper"]) < 0.1) == dark
    for name, colour in style.items():
        if name != "paper":
            light, deep = sorted((luminance(colour), luminance(style["paper"])), reverse=True)
            assert (light + 0.05) / (deep + 0.05) >= 4.5, f"{name} is too close to the paper"


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_a_screen_reader_is_told_what_is_shown(show: Open, viewport: dict[str, int]) -> None:
    page = show("two_cells", viewport)
    page.locator(".toggle").first.click()
    told = page.locator("body").aria_snapshot().replace("''", "'")  # it is YAML
    assert "banner" in told
    assert "main" in told
    assert "heading \"Flow: 1.39 times PyTorch's speed" in told
    assert 'combobox "Engine"' in told
    assert 'button "resnet50 [4, 3, 224, 224]" [expanded]' in told
    assert 'rowheader "resnet50 [4, 3, 224, 224]' in told
    assert "columnheader" in told or viewport is PHONE
    assert re.search(r'img "Speed relative to PyTorch.*Flow: 1.39 at 1', told)
    assert re.search(r'img "PyTorch\'s time / Flow\'s in each of 2 pairs: \d', told)
    assert "status" in told
    levels = [int(found) for found in re.findall(r"heading .*\[level=(\d)\]", told)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_without_scripts_everything_is_shown(show: Open) -> None:
    page = show("two_cells", java_script_enabled=False)
    assert page.locator("tr.detail svg.strip").count() == 4
    assert all(strip.is_visible() for strip in page.locator("tr.detail svg.strip").all())
    assert not page.locator(".filters").is_visible()


def test_a_name_runs_no_script(show: Open, situations: dict[str, Any]) -> None:
    tree = json.loads(document_text(situations["profiled"].document))
    attacks = [
        "</title><script>alert(1)</script>",
        '"><img src=x onerror=alert(2)>',
        "</style><script>alert(3)</script>",
    ]
    tree["engines"][0]["display_name"], tree["machine"]["cpu_model"], tree["run_id"] = attacks
    tree["profiles"][0]["missing"] = attacks
    page = show(report.render(parse_document(json.dumps(tree)), "html"))
    assert page.locator("script").count() == 1
    assert page.locator("img[src]").count() == 0
    assert attacks[0] in page.locator("h1").inner_text()
    # Even markup that came in by another way would not run: the page allows its own script alone.
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<b id=late onclick=\"window.ran = true\">x</b>')")
    page.locator("#late").click()
    assert page.evaluate("window.ran") is None
    assert "Content Security Policy" in show.complaints.pop()


def test_five_hundred_cells_are_a_small_file_that_opens(show: Open, situations: dict[str, Any]) -> None:
    made = situations["five_hundred_cells"]
    text = report.render(made.document, "html", comparison=made.comparison)
    assert len(text.encode()) < 5 * 1024 * 1024
    page = show(text)
    assert page.locator("tr.row[data-engine]").count() == 250
    assert page.locator("output").inner_text() == "all 250 cells"
