"""The page in a real browser, with small models."""

import shutil
import time

import numpy as np
import pytest

from mega_runtime import Classifier, Translator
from tests.helpers import browser as browsers
from tests.helpers.page import CHAPTER, MISSING, PAGE, Served

pytestmark = pytest.mark.slow

CHAPTER_LINES = CHAPTER.read_text().split("\n")[:-1]
STATUS = "return document.querySelector('#{} .status').textContent"
TRANSLATED = "return Array.from(document.querySelectorAll('.translation'), (each) => each.textContent)"
BUSY = "return document.querySelector('#{} form').getAttribute('aria-busy') === 'true'"


@pytest.fixture(scope="module")
def window():
    missing = browsers.missing() or MISSING
    if missing is not None:
        pytest.skip(missing)
    with browsers.Browser() as running:
        yield running


@pytest.fixture(scope="module")
def server(models):
    with Served(models) as running:
        yield running


def opened(window, server):
    window.open(server.address)
    window.wait(lambda: window.run("return document.body.dataset.ready"))
    return window


@pytest.fixture
def page(window, server):
    """The page, without complaints of the browser after the test."""
    yield opened(window, server)
    assert window.errors() == []


def finished(page, panel):
    page.wait(lambda: not page.run(BUSY.format(panel)))
    return page.run(STATUS.format(panel))


# ------------------------------------------------------------------------------------------- translation


def test_a_held_out_chapter_is_translated_as_by_the_runtime(page, models):
    page.run("document.querySelector('#source').value = arguments[0]", "\n".join(CHAPTER_LINES))
    page.click("#translate [type=submit]")
    assert finished(page, "translate").startswith(f"{len(CHAPTER_LINES)} of {len(CHAPTER_LINES)} lines")
    expected = Translator(models / "documents").translate_documents([CHAPTER_LINES])[0]
    assert page.run(TRANSLATED) == expected
    assert page.run("return document.querySelectorAll('#translate .speed polyline').length") == 1


def test_text_is_typed_and_its_words_show_where_they_look(page, models):
    page.type("#source", "And Noah begat three sons.")
    page.type("#source", browsers.CONTROL + browsers.ENTER)
    finished(page, "translate")
    assert (
        page.run(TRANSLATED)
        == Translator(models / "documents").translate_documents([["And Noah begat three sons."]])[0]
    )
    assert page.run("return document.querySelector('.looks canvas').height") > 20
    marked = "return document.querySelectorAll('.lines [style*=background]').length"
    assert page.run(marked) == 0
    page.run("document.querySelector('.translation [tabindex=\"0\"]').focus()")
    assert page.run(marked) > 0
    words = page.run("return document.querySelectorAll('.translation span').length")
    assert words > 1
    place = "return Array.from(document.querySelectorAll('.translation span')).indexOf(document.activeElement)"
    for key, expected in ((browsers.ARROW_RIGHT, 1), (browsers.ARROW_LEFT, 0), (browsers.ARROW_LEFT, 0)):
        page.type(".translation [tabindex='0']", key)
        assert page.run(place) == expected
    assert page.run("return document.querySelectorAll('.chosen').length") == 1


def test_no_text_asks_for_one(page):
    page.click("#translate [type=submit]")
    assert page.run(STATUS.format("translate")) == "Type a text first."


def test_a_newer_request_takes_the_place_of_one_that_runs(page, models):
    """What the older one gave and its end are not shown with the newer one's."""
    page.run(
        """
        window.said = [];
        const status = document.querySelector("#translate .status");
        new MutationObserver(() => window.said.push(status.textContent)).observe(status, { childList: true });
        """
    )
    submit = """
        document.querySelector("#source").value = arguments[0];
        document.querySelector("#translate form").requestSubmit();
    """
    page.run(submit, "\n".join(CHAPTER_LINES * 9))
    page.wait(lambda: page.run("return window.said.length > 2"))
    page.run(submit, "And God said.")
    assert finished(page, "translate").startswith("1 of 1 lines")
    page.run(submit, "\n".join(CHAPTER_LINES * 9))
    page.wait(lambda: page.run(STATUS.format("translate")).count("of 198") > 0)
    page.run(submit, "")
    assert not page.run(BUSY.format("translate"))
    time.sleep(1)
    assert page.run(STATUS.format("translate")) == "Type a text first."
    assert not [each for each in page.run("return window.said") if "stopped" in each]


def test_an_example_with_a_number_that_is_missing_does_not_run(page):
    page.run("document.querySelector('#write [name=tokens]').value = ''; ")
    page.run("for (const each of document.querySelectorAll('#write .examples button')) each.click()")
    assert page.run(STATUS.format("write")) == ""
    assert not page.run(BUSY.format("write"))


def test_5000_words_are_translated_line_by_line_while_the_page_responds_and_can_be_stopped(page):
    words = (" ".join(CHAPTER_LINES) + " ").split() * 12
    lines = [" ".join(words[n : n + 20]) for n in range(0, 5000, 20)]
    page.run(
        """
        window.longest = 0;
        let before = performance.now();
        setInterval(() => {
            window.longest = Math.max(window.longest, performance.now() - before);
            before = performance.now();
        }, 10);
        document.querySelector("#source").value = arguments[0];
        """,
        "\n".join(lines),
    )
    page.click("#translate [type=submit]")
    done = "return Array.from(document.querySelectorAll('.translation')).filter((each) => each.textContent).length"
    page.wait(lambda: page.run(done) >= 30)
    page.click("#translate [name=stop]")
    assert finished(page, "translate").endswith("stopped")
    count = page.run(done)
    assert 30 <= count < len(lines)
    assert page.run("return window.longest") < 1000
    time.sleep(0.5)
    assert page.run(done) == count


def test_a_line_that_is_too_long_is_named(page):
    page.run("document.querySelector('#source').value = arguments[0]", "And it came to pass.\n" + "unto " * 5000)
    page.click("#translate [type=submit]")
    assert "line 2 has" in finished(page, "translate")
    assert page.run("return document.querySelector('#translate .status').className") == "status error"


# ------------------------------------------------------------------------------------------- text, digits


def test_a_text_continues_with_the_half_lives_of_the_layers(page):
    assert page.run("return document.querySelectorAll('.lives .bar').length") == 2
    page.run("document.querySelector('#write [name=tokens]').value = 40")
    page.run("document.querySelector('#write [name=temperature]').value = 0")  # others may draw the end of the text
    page.type("#start", "Fellow citizens")
    page.click("#write [type=submit]")
    assert finished(page, "write").startswith(("40 tokens", "39 tokens"))
    written = page.run("return document.querySelector('.written').textContent")
    assert written.startswith("Fellow citizens")
    assert len(written) > 30


def test_fields_of_the_keyboard_are_classified_as_by_the_runtime(page, models):
    """From the field (3, 3), two to the right and one down."""
    right, down = browsers.ARROW_RIGHT, "\ue015"
    page.type("#draw canvas", f" {right} {right}{down} ")
    finished(page, "draw")
    fields = np.zeros((8, 8), np.uint8)
    fields[3, 3] = fields[3, 4] = fields[4, 5] = 255
    (expected,) = Classifier(models / "digits").predict([fields.ravel()])
    found = page.run("return Array.from(document.querySelectorAll('.classes meter'), (meter) => meter.value)")
    assert found == pytest.approx(list(expected.probabilities.values()), abs=1e-5)
    assert page.run(STATUS.format("draw")).startswith(f"It looks like {expected.label},")


def test_a_digit_is_drawn_and_cleared(page):
    ink = """
        const canvas = document.querySelector("#draw canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const sums = Array(64).fill(0);
        for (let y = 2; y < canvas.height; y++) for (let x = 2; x < canvas.width; x++)
            if (x % 32 > 1 && y % 32 > 1) sums[(y >> 5) * 8 + (x >> 5)] += data[4 * (y * canvas.width + x) + 3];
        return sums;
    """
    page.drag("#draw canvas", [(0, -90), (0, 0), (0, 90)])
    assert finished(page, "draw").startswith("It looks like ")
    drawn = np.reshape(page.run(ink), (8, 8))
    assert (drawn[1:7, 3:5] > 0).all()
    assert (drawn[:, [0, 1, 6, 7]] == 0).all()
    page.click("#draw [name=clear]")
    assert page.run(STATUS.format("draw")) == ""
    assert sum(page.run(ink)) == 0


# ------------------------------------------------------------------------------------------- files, screens


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("lost", "models/documents/weights.bin cannot be read (Not Found); copy the folder again"),
        ("cut", "models/documents/weights.bin is incomplete or was changed; copy the folder again"),
    ],
)
def test_a_lost_or_changed_file_concerns_its_panel_only(window, models, tmp_path, change, words):
    shutil.copytree(models, tmp_path / "models")
    path = tmp_path / "models/documents/weights.bin"
    content = path.read_bytes()
    path.unlink()
    if change == "cut":
        path.write_bytes(content[:-1])
    with Served(tmp_path / "models") as server:
        page = opened(window, server)
        page.type("#source", "And" + browsers.CONTROL + browsers.ENTER)
        assert finished(page, "translate") == words
        page.type("#draw canvas", " ")
        assert finished(page, "draw").startswith("It looks like ")
    window.errors()  # the lost file is among them


def test_a_config_without_content_concerns_its_folder_only(window, models, tmp_path):
    shutil.copytree(models / "digits", tmp_path / "digits")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("null")
    with Served(tmp_path) as server:
        page = opened(window, server)
        page.type("#draw canvas", " ")
        assert finished(page, "draw").startswith("It looks like ")


def test_a_page_without_onnxruntime_says_so_until_it_is_there(window, models, monkeypatch, tmp_path):
    shutil.copytree(PAGE, tmp_path / "page", ignore=shutil.ignore_patterns("ort"))
    with Served(models) as server:
        with monkeypatch.context() as patch:
            patch.setitem(server.running.RequestHandlerClass.func.file.__globals__, "PAGE", tmp_path / "page")
            page = opened(window, server)
            for _ in range(2):
                page.type("#draw canvas", " ")
                assert finished(page, "draw") == "the page's programs cannot be loaded; run make page again"
        page.type("#draw canvas", " ")
        assert finished(page, "draw").startswith("It looks like ")
    window.errors()


def test_panels_without_a_model_say_so(window, models, tmp_path):
    shutil.copytree(models / "digits", tmp_path / "digits")
    with Served(tmp_path) as server:
        page = opened(window, server)
        shown = "return getComputedStyle(document.querySelector(arguments[0])).display !== 'none'"
        for panel, has in (("translate", False), ("write", False), ("draw", True)):
            assert page.run(shown, f"#{panel} form") == has
            assert page.run(shown, f"#{panel} .missing") != has


def test_the_page_fits_narrow_screens_and_follows_the_colours_of_the_system(page):
    back = "return getComputedStyle(document.body).backgroundColor"
    try:
        page.resize(320, 800)
        assert page.run("return document.documentElement.scrollWidth") <= 320
        colours = []
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            page.devtools("Emulation.setEmulatedMedia", {"features": features})
            colours.append(page.run(back))
        assert len(set(colours)) == 2
    finally:
        page.devtools("Emulation.setEmulatedMedia", {"features": []})
        page.devtools("Emulation.clearDeviceMetricsOverride", {})


def test_all_controls_have_names(page):
    nameless = """
        return Array.from(document.querySelectorAll("button, select, input, textarea, canvas"))
            .filter((each) => !each.textContent && !each.ariaLabel && !(each.labels && each.labels.length > 0))
            .map((each) => each.outerHTML);
    """
    assert page.run(nameless) == []


def test_other_servers_are_never_asked(page):
    """Nor could they be: the server's policy forbids it."""
    hosts = "return performance.getEntriesByType('resource').map((each) => new URL(each.name).host)"
    assert set(page.run(hosts)) == {page.run("return location.host")}
    assert page.run("return fetch('http://127.0.0.2:9/').then(() => 'asked', (error) => error.name)") == "TypeError"
    said = page.errors()
    assert said
    assert all("Content Security Policy" in each for each in said)
