"""A browser shows the report of `bench` on a light screen, on a dark screen, on a phone and on paper."""

import pytest
from ruvmlx.apps.bench import page

from ..server import browser
from .test_rows import REPORT

pytestmark = pytest.mark.skipif(not browser.is_found(), reason="chromium and chromedriver are not installed")
WHITE, PAPER = "rgb(255, 255, 255)", "rgb(0, 0, 0)"


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    (folder / "report.html").write_text(page.html(REPORT))
    opened = browser.Browser(folder)
    opened.open((folder / "report.html").as_uri())
    yield opened
    opened.close()


def style(window, selector, name):
    return window.run(
        "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, name
    )


def light(colour):
    """How light an rgb colour is, 0 to 255."""
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(", "))) / 3


@pytest.mark.parametrize("width", [360, 1000])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_screen(window, width, scheme):
    """Nothing is wider than the screen but what scrolls by itself; all text stands out."""
    window.emulate(width, 800, scheme)
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    ground = style(window, "body", "backgroundColor")
    assert (ground == WHITE) == (scheme == "light")
    for selector in ("body", "small", ".warn", ".yes"):
        under = style(window, ".warn", "backgroundColor") if selector == ".warn" else ground
        assert abs(light(style(window, selector, "color")) - light(under)) > 90, selector
    assert (style(window, "svg", "filter") == "none") == (scheme == "light")


def test_on_paper(window):
    """Black on white, also if the screen is dark."""
    window.emulate(800, 1100, "dark", "print")
    assert style(window, "body", "color") == PAPER and style(window, "body", "backgroundColor") == WHITE
    assert style(window, "svg", "filter") == "none" and style(window, "tr", "breakInside") == "avoid"
