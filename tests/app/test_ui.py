"""What the page at /ui does, in a real headless Chromium, over a fake model."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from app_fakes import HEADS, LAYERS, make_settings, on_a_socket, write_artifact
from browser import Page, chromium, find_chromium, ready
from fake_graphs import gold_weights, pairs_of, plan_pairs

from app.settings import Settings

WORDS = "the cat sat on a mat"  # with [CLS] and [SEP] eight tokens
POINTS = [
    {"density": 0.5, "sparsity": 0.5, "recall": 0.98},
    {"density": 0.4, "sparsity": 0.6, "recall": 0.8},  # beaten by the next
    {"density": 0.3, "sparsity": 0.7, "recall": 0.9},
    {"density": 0.1, "sparsity": 0.9, "recall": 0.6},
]
LAYER_ROWS = [{"layer": n, "sparsity": 0.7 + n / 10, "recall": 0.9 - n / 10, "heads": []} for n in range(LAYERS)]
CALIBRATION = {"set": "plan", "overall": {"sparsity": 0.7, "recall": 0.9}, "layers": LAYER_ROWS}
needs_browser = pytest.mark.skipif(find_chromium() is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def page(downloads: Path) -> Iterator[Page]:
    with chromium(downloads) as page:
        yield page


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with on_a_socket(calibrated(tmp_path_factory.mktemp("served"))) as address:
        yield address


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with on_a_socket(calibrated(tmp_path_factory.mktemp("guarded"), api_keys="open-sesame")) as address:
        yield address


def calibrated(root: Path, **values: Any) -> Settings:
    artifact = write_artifact(root / "calibrated", version="v7", calibration=CALIBRATION)
    return make_settings(root, artifact=artifact, **values)


@pytest.fixture
def opened(page: Page, address: str) -> Iterator[Page]:
    """The page over the fake model, with a short text shown, light and wide; and no complaint after the test."""
    page.complaints.clear()
    page.size(1200, 900)
    page.open(f"{address}/ui")
    ready(page)
    show(page, WORDS)
    yield page
    assert page.complaints == []


def show(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.click("#show")
    tokens = len(text.split()) + 2
    page.wait(f"document.querySelectorAll('#tokens button').length === {tokens}")
    ready(page)


def counts(page: Page) -> tuple[int, ...]:
    return tuple(int(page.text(f"#count-{kind}")) for kind in ("hit", "missed", "spare", "legal"))


def expected(tokens: int, layer: int, head: int) -> tuple[int, ...]:
    plan, gold = plan_pairs(tokens, layer, head), set(gold_weights(tokens))
    return len(plan & gold), len(gold - plan), len(plan - gold), tokens**2


def drawn(page: Page) -> int:
    """Pixels of the matrix that are not white."""
    return int(
        page.on(
            "#matrix",
            "const c = new OffscreenCanvas(e.width, e.height).getContext('2d', {willReadFrequently: true});"
            " c.drawImage(e, 0, 0); const d = c.getImageData(0, 0, e.width, e.height).data;"
            " let n = 0; for (let a = 0; a < d.length; a += 4) n += d[a] < 255; return n;",
        )
    )


@needs_browser
def test_a_pasted_text_is_drawn_and_counted_as_the_answer_says(opened: Page) -> None:
    layer, head = LAYERS // 2, 0
    assert counts(opened) == expected(8, layer, head)
    before = drawn(opened)
    assert before > 500
    for kind in ("hit", "missed", "spare"):
        opened.click(f"#show-{kind}")
    assert drawn(opened) < before
    show(opened, f"{WORDS} again and again")
    assert counts(opened) == expected(11, layer, head)


@needs_browser
def test_layers_and_heads_are_switched(opened: Page) -> None:
    opened.choose("#layer", "0")
    opened.wait("document.querySelector('#about-answer').textContent.includes('layer 0')")
    opened.choose("#head", "2")
    assert counts(opened) == expected(8, 0, 2)
    assert opened.evaluate("document.querySelectorAll('#heads button').length") == HEADS
    opened.click("#heads button:nth-child(2)")
    assert opened.evaluate("document.querySelector('#head').value") == "1"
    assert counts(opened) == expected(8, 0, 1)
    assert opened.evaluate("document.querySelector('#heads [aria-pressed=true] span').textContent").startswith("1")
    opened.choose("#set", "pattern")
    without_itself = plan_pairs(8, 0, 1) - {(i, i) for i in range(8)}
    assert counts(opened)[2] == len(without_itself - set(gold_weights(8)))


@needs_browser
def test_the_keyboard_moves_and_the_live_region_speaks(opened: Page) -> None:
    opened.on("#tokens button", "e.click();")  # the first token is the query; its strongest key is the next one
    assert opened.text("#readout").startswith("query ‘")
    opened.on("#matrix", "e.focus();")
    said = {}
    for name in ("Home", "ArrowRight", "ArrowRight", "End"):
        opened.key(name)
        said[name] = opened.text("#readout")
    names = opened.evaluate("[...document.querySelectorAll('#tokens button span:first-child')].map(e => e.textContent)")
    layer = LAYERS // 2
    assert said["Home"] == f"query ‘{names[0]}’ reads key ‘{names[0]}’: gold, predicted, weight .25"
    assert said["ArrowRight"] == spoken(names, layer, 0, 2)
    assert said["End"] == spoken(names, layer, 0, 7)
    opened.key("Home")
    opened.key("ArrowDown")
    assert opened.text("#readout") == spoken(names, layer, 1, 0)
    opened.key("PageDown")
    assert opened.text("#readout") == spoken(names, layer, 1, 2)
    assert opened.evaluate("document.activeElement.id") == "matrix"
    assert opened.on("#readout", "return [e.getAttribute('aria-live'), e.getAttribute('role')]") == ["polite", "status"]
    for _ in range(9):  # the end of the matrix is the end
        opened.key("ArrowUp")
    assert opened.text("#readout").startswith(f"query ‘{names[0]}’")


def spoken(names: list[str], layer: int, i: int, j: int) -> str:
    plan, weight = plan_pairs(8, layer, 0), gold_weights(8).get((i, j))
    weighed = f"{weight:.2f}"[1:] if weight else ""
    query, key = f"‘{names[i]}’", f"‘{names[j]}’"
    if weight:
        if (i, j) in plan:
            return f"query {query} reads key {key}: gold, predicted, weight {weighed}"
        return f"query {query} misses key {key}: gold, not predicted, weight {weighed}"
    if (i, j) in plan:
        return f"query {query} reads key {key}: spare, predicted but not gold"
    return f"query {query} does not read key {key}: neither gold nor predicted"


@needs_browser
def test_tokens_are_one_stop_of_the_tabulator_and_show_what_is_read(opened: Page) -> None:
    opened.on("#tokens button:nth-child(3)", "e.click(); e.focus();")
    opened.key("ArrowRight")
    state = opened.evaluate(
        "[...document.querySelectorAll('#tokens button')]"
        ".map(e => [e.tabIndex, e.getAttribute('aria-pressed'), e.className])"
    )
    assert [row[:2] for row in state] == [[0 if at == 3 else -1, str(at == 3).lower()] for at in range(8)]
    layer, gold = LAYERS // 2, gold_weights(8)
    for at, (_, _, name) in enumerate(state):
        kept, needed = (3, at) in plan_pairs(8, layer, 0), (3, at) in gold
        kind = {(True, True): "hit", (False, True): "missed", (True, False): "spare"}.get((kept, needed))
        assert set(name.split()) & {"hit", "missed", "spare"} == ({kind} if kind else set())
    arcs = opened.evaluate("[...document.querySelectorAll('#arcs path.arc')].map(e => e.classList[1])")
    assert sorted(arcs) == sorted(name for _, _, names in state for name in names.split() if name in arcs)
    opened.click("#all-arcs")
    assert opened.evaluate("document.querySelectorAll('#arcs path.arc').length") == sum(counts(opened)[:3])


@needs_browser
def test_what_is_exported_is_what_the_service_said(opened: Page, address: str, downloads: Path) -> None:
    opened.on("#export-json", "e.click();")
    opened.on("#export-png", "e.click();")
    stem = f"attention-layer{LAYERS // 2}-head0"
    answer = json.loads(arrived(opened, downloads / f"{stem}.json"))
    assert answer["object"] == "attention"
    head = answer["layers"][0]["heads"][0]
    assert pairs_of(head["plan"]) == plan_pairs(8, LAYERS // 2, 0)
    assert (downloads / f"{stem}.json").read_text() == opened.answer(f"{address}/v1/attention")
    picture = arrived(opened, downloads / f"{stem}.png")
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert min(width, height) > 300


def arrived(page: Page, path: Path) -> bytes:
    until = time.monotonic() + 20
    while not path.exists() or path.stat().st_size == 0:
        assert time.monotonic() < until, f"{path.name} was not saved"
        page.evaluate("1")
        time.sleep(0.05)
    return path.read_bytes()


WITH_POINTS = """
const real = window.fetch;
window.asked = [];
window.fetch = async (path, options) => {
  if (String(path).endsWith("v1/attention")) {
    const {density, ...body} = JSON.parse(options.body);
    window.asked.push(density ?? null);
    return real(path, {...options, body: JSON.stringify(body)});
  }
  const answer = await real(path, options);
  if (!String(path).endsWith("v1/sparsity")) return answer;
  return new Response(JSON.stringify({...await answer.json(), points: POINTS}));
};
"""


@needs_browser
def test_a_picture_that_the_browser_cannot_draw_is_told(opened: Page) -> None:
    show(opened, WORDS)
    opened.evaluate("HTMLCanvasElement.prototype.toBlob = (done) => done(null), 0")
    opened.click("#export-png")
    opened.wait("document.querySelector('#error').textContent.includes('more than this browser can draw')")


@needs_browser
def test_calibration_and_live_figures_are_shown(opened: Page) -> None:
    rows = opened.evaluate("[...document.querySelectorAll('#layers tbody tr')].map(e => e.textContent)")
    assert rows == [f"{n}calibration.{700 + 100 * n}.{900 - 100 * n}" for n in range(LAYERS)]
    assert "sparsity 70.0 %, recall 90.0 %" in opened.text("#front-about")
    opened.wait("document.querySelectorAll('#live dd').length === 6")
    opened.click("#pause")
    asked = len([one for one in opened.requests if one.endswith("/metrics")])
    time.sleep(2.3)
    assert len([one for one in opened.requests if one.endswith("/metrics")]) <= asked + 1
    assert opened.text("#pause") == "Resume"


@needs_browser
def test_working_points_are_drawn_with_their_front_and_can_be_chosen(page: Page, address: str) -> None:
    page.complaints.clear()
    source = WITH_POINTS.replace("POINTS", json.dumps(POINTS))
    script = page.send("Page.addScriptToEvaluateOnNewDocument", source=source)["identifier"]
    page.open(f"{address}/ui")
    page.send("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
    ready(page)
    page.wait(f"document.querySelectorAll('#front circle.point').length === {len(POINTS)}")
    assert len(page.on("#front .front", "return e.getAttribute('d');").split("L")) == 3  # one point is beaten
    options = page.evaluate("[...document.querySelector('#density').options].map(e => e.value)")
    assert options == ["", *(str(point["density"]) for point in POINTS)]
    page.choose("#density", "0.3")
    page.wait("window.asked.length === 2")
    ready(page)
    page.choose("#attention", "dense")  # reads no plan, so it has no density
    page.click("#show")
    page.wait("window.asked.length === 3")
    ready(page)
    assert page.evaluate("window.asked") == [None, 0.3, None]
    assert page.evaluate("document.querySelectorAll('#front circle.chosen').length") == 1
    assert page.complaints == []


@needs_browser
def test_errors_are_told_in_the_services_words(opened: Page) -> None:
    opened.click("#truncate")  # off
    opened.fill("#text", "word " * 40)
    opened.click("#show")
    said = opened.wait("!document.querySelector('#error').hidden && document.querySelector('#error').textContent")
    assert "expected at most 16 tokens, got 42" in said
    assert "input_too_long" in said
    assert all("422" in one for one in opened.complaints)  # the browser's own line about the status
    opened.complaints.clear()
    show(opened, WORDS)
    assert opened.evaluate("document.querySelector('#error').hidden")


@needs_browser
def test_a_key_is_asked_for_and_kept_in_the_tab(page: Page, guarded: str) -> None:
    page.complaints.clear()
    page.open(f"{guarded}/ui")
    page.wait("!document.querySelector('#key-form').hidden")
    assert page.evaluate("document.activeElement.id") == "key"
    page.fill("#key", "wr\u014dng")
    page.click("#key-form button")
    page.wait("document.querySelector('#error').textContent.includes('no header can carry')")
    page.fill("#key", "wrong")
    page.click("#key-form button")
    page.wait("document.querySelector('#error').textContent.includes('not known')")
    page.fill("#key", "open-sesame")
    page.click("#key-form button")
    ready(page)
    assert page.evaluate("document.querySelector('#key-form').hidden && document.querySelector('#error').hidden")
    page.open(f"{guarded}/ui")
    ready(page)
    assert page.evaluate("localStorage.length") == 0
    assert all("401" in one for one in page.complaints)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overflows_a_narrow_screen(opened: Page, tmp_path: Path, dark: bool) -> None:
    show(opened, "averylongwordwithoutanyplacetobreakitwhateverthescreen " * 6)
    opened.size(360, 740, dark=dark)
    opened.wait("innerWidth === 360")
    time.sleep(0.4)
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360
    assert opened.screenshot(tmp_path / "narrow.png")[:4] == b"\x89PNG"
    ground = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == dark


@needs_browser
def test_nobody_else_is_asked_for_anything(opened: Page, address: str, guarded: str) -> None:
    assert len(opened.requests) > 20
    allowed = (f"{address}/", f"{guarded}/", f"blob:{address}/", "about:blank")
    assert [one for one in opened.requests if not one.startswith(allowed)] == []
