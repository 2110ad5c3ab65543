"""The page in a real browser: it sorts, filters, draws and reads, without an error and without a foreign script."""

import pytest

from tests.browser import Browser, find_browser
from tests.evaluation.page.conftest import HOSTILE, answer, plain, report, write_run

PATH = find_browser()
WANTED = "no Chromium; Debian: apt-get install chromium; or name one with CHROMIUM=PATH"
pytestmark = pytest.mark.skipif(PATH is None, reason=WANTED)

COLUMN = "[...document.querySelectorAll('#main thead th')].findIndex((th) => th.dataset.name === '{}')"
SHOWN = "[...document.querySelectorAll('#main tbody tr')].filter((row) => row.offsetParent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(str(PATH), tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser, report_folder):
    """The report, loaded anew. Whatever a test did with it, its console stays silent and it asks for nothing."""
    browser.errors.clear()
    browser.requests.clear()
    browser.look(width=1280)
    browser.open(report_folder / "report.html")
    yield browser
    assert browser.run("window.broken") is None, "text of a model ran as a script"
    assert browser.errors == []
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)


def values(page, name: str) -> list[str]:
    return page.run(
        f"(() => {{ const c = {COLUMN.format(name)}; return {SHOWN}.map((r) => r.cells[c].dataset.value) }})()"
    )


def click(page, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).click()")


def count(page) -> str:
    return page.run("document.querySelector('#count').value")


def choose(page, selector: str, value: str) -> None:
    page.run(
        f"(() => {{ const e = document.querySelector({selector!r}); e.value = {value!r};"
        "e.dispatchEvent(new Event('input', { bubbles: true })) })()"
    )


def test_the_console_notices_what_is_wrong(browser, tmp_path):
    """The watch that the other tests rely on."""
    bad = tmp_path / "bad.html"
    bad.write_text("<script>console.error('one'); setTimeout(() => missing(), 0)</script><img src='gone.png'>")
    browser.open(bad)
    browser.run("new Promise((done) => setTimeout(done, 100))")
    assert any("one" in error for error in browser.errors) and any("missing" in error for error in browser.errors)


def test_it_renders(page):
    assert page.run("document.querySelector('h1').textContent") == "study <i>"
    assert page.run("[...document.images].every((image) => image.naturalWidth > 0)")
    assert page.run("document.images.length") >= 3
    heads = page.run("[...document.querySelectorAll('h2')].map((h) => h.textContent)")
    assert heads == [
        "Setup", "Main table", "Figures", "Draft trees", "Single answers", "Losslessness", "Commands",
    ]  # fmt: skip
    assert page.run("getComputedStyle(document.body).maxWidth") != "none", "the style sheet is refused"


def test_it_sorts(page):
    head = f"document.querySelectorAll('#main thead button')[{COLUMN.format('mat')}].click()"
    before = values(page, "mat")
    page.run(head)
    assert [float(v) for v in values(page, "mat")] == sorted(map(float, before), reverse=True)
    page.run(head)
    assert [float(v) for v in values(page, "mat")] == sorted(map(float, before))
    page.run(f"document.querySelectorAll('#main thead button')[{COLUMN.format('method')}].click()")
    assert values(page, "method") == sorted(values(page, "method"))
    assert page.run("document.querySelectorAll('#main [aria-sort]').length") == 1


def test_subtasks_come_by_a_click_and_by_a_key(page):
    assert values(page, "category") == ["overall"] * 2 and count(page) == "2 of 8 rows"
    click(page, ".fold")
    assert values(page, "method") == ["vanilla"] * 4 + ["recycling (hot)"]
    assert page.run("document.querySelector('.fold').getAttribute('aria-expanded')") == "true"
    page.run(f"document.querySelectorAll('#main thead button')[{COLUMN.format('mat')}].click()")
    assert values(page, "method") == ["recycling (hot)", *["vanilla"] * 4], "subtasks follow their configuration"
    assert values(page, "category")[:2] == ["overall"] * 2
    page.run("document.querySelector('.fold').focus()")
    page.press("Enter")
    assert count(page) == "8 of 8 rows"
    click(page, "#main tbody td")
    assert count(page) == "5 of 8 rows"
    click(page, "#unfold")
    assert count(page) == "8 of 8 rows"
    click(page, "#unfold")
    assert values(page, "category") == ["overall"] * 2


def test_the_table_can_be_copied(page):
    click(page, "#unfold")
    page.run("getSelection().selectAllChildren(document.querySelector('#main'))")
    copied = page.run("getSelection().toString()").splitlines()
    assert [line.split("\t")[0] for line in copied if "\toverall\t" in line] == ["vanilla", "recycling (hot)"]
    assert copied[0].startswith("method\tcategory\t") and any("\tqa\t" in line for line in copied)


def test_it_filters(page):
    choose(page, "#by-category", "qa")
    assert values(page, "category") == ["qa"] * 2, "of all configurations, folded or not"
    choose(page, "#by-method", "vanilla")
    assert values(page, "method") == ["vanilla"] and count(page) == "1 of 8 rows"
    choose(page, "#by-category", "")
    choose(page, "#by-method", "")
    choose(page, "#find", "QA vanilla")
    assert values(page, "category") == ["qa"] and count(page) == "1 of 8 rows"
    choose(page, "#find", "")
    assert values(page, "category") == ["overall"] * 2
    hidden = page.run("getComputedStyle(document.querySelector('#main .extra')).display")
    click(page, "#extra")
    assert (hidden, page.run("getComputedStyle(document.querySelector('#main .extra')).display")) == (
        "none",
        "table-cell",
    )


def test_it_shows_the_tree(page):
    assert page.run("document.querySelectorAll('details.tree svg .node').length") == 3
    box = page.run(
        "(({ width, height }) => [width, height])(document.querySelector('svg.drawn').getBoundingClientRect())"
    )
    assert box[0] > 400 and box[1] > 30
    fill = "getComputedStyle(document.querySelector('.node.g8 circle')).fill"
    joint = page.run(fill)
    click(page, "#shades input[value=given]")
    assert page.run("document.querySelector('svg.drawn').classList.contains('given')") and joint.startswith("rgb")
    page.run("document.querySelector('.node').focus()")
    page.press("ArrowRight")
    assert page.run("document.querySelector('.tree .detail').textContent").startswith("ranks 0·0: accepted in")


def test_an_answer_that_holds_markup_stays_text(page):
    for method in ("vanilla", "recycling (hot)"):
        choose(page, "#method", method)
        assert HOSTILE in page.run("document.querySelector('#answer .text').textContent")
    assert page.run("document.querySelectorAll('#answer script, #answer img').length") == 0
    assert page.run("document.querySelectorAll('script').length") == 2


def test_the_reader_colours_steps_and_takes_the_keyboard(page):
    choose(page, "#method", "recycling (hot)")
    steps = page.run("[...document.querySelectorAll('#answer .run')].map((run) => run.className)")
    assert steps[:3] == ["run even l1", "run odd l3", "run even l3"]
    colours = page.run(
        "[...document.querySelectorAll('#answer .run')].slice(0, 3).map((run) => getComputedStyle(run).backgroundColor)"
    )
    assert len(set(colours)) == 3
    page.run("document.querySelector('#next').focus()")
    page.press("Tab")
    page.press("ArrowRight")
    told = page.run("document.querySelector('#step').textContent")
    assert told == f"Step 2 of {len(steps)}: 3 tokens; 3 nodes drafted, accepted ranks 0·0."
    assert page.run("document.querySelectorAll('#answer .run[tabindex=\"0\"]').length") == 1
    click(page, "#next")
    assert page.run("document.querySelector('#answer').textContent").startswith("qa, question 1")


def test_the_more_tokens_a_step_added_the_deeper_its_colour(page):
    depth = "[1, 2, 3, 4, 5, 6, 7, 8].map((n) => { const run = document.querySelector('.run').cloneNode();"
    depth += "run.className = `run even l${n}`; document.querySelector('#answer').append(run);"
    depths = page.run(depth + "return parseFloat(getComputedStyle(run).getPropertyValue('--deep')) })")
    assert depths == sorted(set(depths)) and len(depths) == 8


def test_a_deep_tree_is_drawn_in_its_own_width_and_scrolls(browser, tmp_path):
    row = answer(1, "qa", [{"ids": [4, 5, 6], "steps": [(1, 1, []), (2, 37, [0])]}])
    chain = " ".join(",".join("0" * n) for n in range(1, 37))
    write_run(tmp_path / "runs/r", "recycling (hot)", [row], method={"tree": "chain"}, draft_tree=chain)
    browser.look(width=400)
    browser.open(report(tmp_path))
    radius = "document.querySelector('svg.drawn .node circle').getBoundingClientRect().width / 2"
    assert browser.run(radius) > 3, "nodes are too small to be seen"
    assert browser.run("document.documentElement.scrollWidth") <= 400


def test_without_a_tokenizer_the_text_stands_above_a_strip_of_lengths(browser, tmp_path):
    row = answer(1, "qa", [{"ids": [4, 5, 6], "steps": plain([4, 5, 6]), "text": "<i>as</i> recorded"}])
    write_run(tmp_path / "runs/v", "vanilla", [row])
    browser.errors.clear()
    browser.open(report(tmp_path))
    assert browser.run("document.querySelector('#answer .text').textContent") == "<i>as</i> recorded"
    assert browser.run("[...document.querySelectorAll('.steps .run')].map((r) => r.textContent)") == ["1", "1", "1"]
    assert "could not be loaded" in browser.run("document.querySelector('#answers').textContent")
    assert browser.errors == []


def test_light_and_dark(page):
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    page.look(width=1280, dark=True)
    dark = page.run(colour)
    assert light != dark
    click(page, "#theme")
    assert page.run(colour) == light and page.run("document.querySelector('#theme').textContent") == "dark"
    assert page.run("getComputedStyle(document.images[0]).backgroundColor") == "rgb(255, 255, 255)"


def test_it_fits_a_narrow_window_and_paper(page, tmp_path):
    page.look(width=400)
    assert page.run("document.documentElement.scrollWidth") <= 400
    page.look(width=1280)
    page.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert page.run("[...document.querySelectorAll('details')].every((part) => part.open)"), "paper cannot be unfolded"
    assert len(values(page, "mat")) == 2, "folded on the screen"
    page.send("Emulation.setEmulatedMedia", media="print")
    assert len(values(page, "mat")) == 8, "and whole on paper"
    page.send("Emulation.setEmulatedMedia", media="")
