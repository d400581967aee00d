"""The page in headless Chromium: light and dark, narrow and wide, and nothing from the network."""

import re
import time

import pytest

from tests.inspection.browser import Browser, need_chromium
from tests.inspection.conftest import inspected
from tfbackend.inspection.examine import Request, inspect_model
from tfbackend.inspection.page import render_page

SIZES = [(360, 740), (768, 1000), (1280, 900), (1920, 1080)]


@pytest.fixture(scope="module")
def browser():
    need_chromium()
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("pages")
    inspections = {"llama": inspect_model(Request(str(tiny_llama), gpu=24 * 10**9)),
                   "deepseek": inspected("deepseek-v3", tp=8), "gemma": inspected("gemma-3-1b", tp=2)}  # fmt: skip
    for name, found in inspections.items():
        (folder / f"{name}.html").write_text(render_page(found))
    return folder


def test_the_page_asks_for_nothing(pages):
    for page in pages.iterdir():
        text = page.read_text()
        assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", text)
        assert not re.search(r"https?://|@import|url\(", text)


def test_what_comes_with_a_model_is_escaped(tiny_llama, tmp_path):
    import shutil

    folder = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(tiny_llama, folder)
    text = render_page(inspect_model(Request(str(folder))))
    assert "<img" not in text
    assert "&lt;img" in text


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES, ids=lambda n: str(n))
@pytest.mark.parametrize("name", ["llama", "deepseek", "gemma"])
def test_nothing_sticks_out_and_nothing_fails(browser, pages, tmp_path, name, width, height, dark):
    browser.open(pages / f"{name}.html", dark=dark, width=width, height=height)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert [entry for entry in browser.logs() if entry["level"] in ("SEVERE", "WARNING")] == []
    out = browser.run(
        "return [...document.querySelectorAll('.block, .tile, section')].filter(e => {"
        "const b = e.getBoundingClientRect(); return b.left < 0 || b.right > innerWidth + 1 || b.width < 20})"
        ".map(e => e.className)"
    )
    assert out == []
    browser.screenshot(tmp_path / f"{name}.png")
    assert (tmp_path / f"{name}.png").stat().st_size > 20_000


def luminance(colour):
    parts = [int(n) / 255 for n in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_words_stand_out_from_what_they_are_on(browser, pages, dark):
    """WCAG's contrast of 4.5 for names, classes, findings and the diff, each on the nearest background behind it."""
    browser.open(pages / "deepseek.html", dark=dark)
    pairs = browser.run(
        "const back = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;"
        "if (!c.endsWith(', 0)') && c !== 'transparent') return c; } };"
        "return ['.name', '.cls', '.flag', '.findings p', '.findings .where', '.diff .add', '.diff .del', '.diff .at',"
        "'.badge', '.tile span', '.hint', 'td', 'th', 'nav a', '#tip .miss', 'dd p', '.block .becomes'].flatMap(s =>"
        "[...document.querySelectorAll(s)].map(e => [s, getComputedStyle(e).color, back(e)]))"
    )
    assert len(pairs) > 100
    for selector, ink, paper in {tuple(pair) for pair in pairs}:
        light, deep = sorted((luminance(ink), luminance(paper)), reverse=True)
        assert (light + 0.05) / (deep + 0.05) >= 4.5, (selector, ink, paper)


def test_dark_is_dark(browser, pages):
    shades = []
    for dark in (False, True):
        browser.open(pages / "llama.html", dark=dark)
        shades.append(luminance(browser.run("return getComputedStyle(document.body).backgroundColor")))
    assert shades[0] > 0.8
    assert shades[1] < 0.05


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)], ids=["narrow", "wide"])
def test_pointing_at_a_block_tells_of_it(browser, pages, width, height):
    browser.open(pages / "deepseek.html", width=width, height=height)
    browser.hover('.block[data-path="layers.3.self_attn"]')
    time.sleep(0.2)
    said = browser.run("const t = document.getElementById('tip'); return t.hidden ? '' : t.innerText")
    assert "layers.3.self_attn and 57 like it" in said
    assert re.search(r"modeling_deepseek_v3\.py:\d+", said)
    box = browser.run("const b = document.getElementById('tip').getBoundingClientRect();"
                      "return [b.left, b.top, b.right, b.bottom]")  # fmt: skip
    assert box[0] >= 0
    assert box[2] <= width
    assert box[1] < height


def test_pointing_shows_shapes(browser, pages):
    browser.open(pages / "llama.html")
    browser.hover('.block[data-path="layers.0.mlp.down_proj"]')
    time.sleep(0.2)
    assert "64 x 96" in browser.run("return document.getElementById('tip').innerText")


def test_colours_say_what_became_of_a_block(browser, pages):
    browser.open(pages / "deepseek.html")
    paths = ["layers.0.mlp", "layers.0.mlp.gate_proj", "layers.0.self_attn", "layers.3.mlp.experts"]
    states = browser.run(
        "return arguments[0].map(p => { const e = document.querySelector(`.block[data-path='${p}']`);"
        "return [e.className, getComputedStyle(e).borderLeftColor] })", paths)  # fmt: skip
    for (classes, _), path in zip(states, paths, strict=True):
        site = next(s for s in inspected("deepseek-v3", tp=8).tree.walk() if s.path == path)
        assert site.state in classes.split()
    by_state = {classes.split()[1]: colour for classes, colour in states}
    assert len(set(by_state.values())) == len(by_state)


def test_the_ledger_can_be_searched(browser, pages):
    browser.open(pages / "llama.html")
    count = "return document.querySelectorAll('#rows tr').length"
    assert browser.run(count) == 21
    search = "const s = document.getElementById('search'); s.value = arguments[0]; s.dispatchEvent(new Event('input'));"
    browser.run(search, "layers.1 Q_PROJ shard")
    assert browser.run(count) == 1
    assert "model.layers.1.self_attn.q_proj.weight" in browser.run("return document.getElementById('rows').innerText")
    browser.run(search, "no such tensor")
    assert browser.run(count) == 0
    assert browser.run("return document.getElementById('shown').textContent") == "0 of 21"
    browser.run(search, "")
    browser.run("document.querySelector('#outcomes button').click()")
    assert browser.run("return document.querySelector('#outcomes button').getAttribute('aria-pressed')") == "true"


def test_blocks_can_be_reached_and_kept_with_the_keyboard(browser, pages):
    browser.open(pages / "llama.html")
    press = ("const e = document.querySelector(\".block[data-path='norm']\"); e.focus();"
             "e.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}));"
             "return [document.getElementById('tip').className, document.getElementById('tip').innerText]")  # fmt: skip
    classes, said = browser.run(press, "Enter")
    assert "pinned" in classes
    assert said.startswith("norm")
    assert "pinned" not in browser.run(press, "Escape")[0]
