"""The files of the page at /ui, by themselves: what is sent, what it may load, its names and its colours."""

import html.parser
import re
from pathlib import Path

from app_fakes import error_of, make_settings, serving
from starlette.testclient import TestClient

from app.routes.ui import FILES, PAGE

UI = Path(__file__).parents[2] / "app" / "ui"
CONTROLS = {"input", "select", "textarea", "button", "canvas"}
VOID = {"meta", "link", "img", "input", "br"}


def test_every_file_is_sent_as_it_lies_in_the_package_and_no_other(client: TestClient) -> None:
    assert {path.name for path in UI.iterdir()} == set(FILES)
    for name in FILES:
        answer = client.get("/ui" if name == PAGE else f"/ui/{name}")
        assert answer.status_code == 200
        assert answer.content == (UI / name).read_bytes()
        assert answer.headers["x-content-type-options"] == "nosniff"
    for name in ("secret.js", "..%2f..%2fpyproject.toml", "../settings.py", "%2e%2e/engine.py", "index.html/x"):
        assert client.get(f"/ui/{name}").status_code == 404
    error_of(client.get("/ui/secret.js"), 404, "not_found")


def test_nothing_may_be_run_or_fetched_but_the_page_itself(client: TestClient) -> None:
    policy = client.get("/ui").headers["content-security-policy"]
    assert policy.split("; ")[0] == "default-src 'self'"
    assert "unsafe" not in policy
    for name, file in FILES.items():
        text = re.sub(r'xmlns="[^"]*"|SVG = "[^"]*"', "", file.content.decode())
        assert not re.search(r"https?:|//[a-z]|@import|url\(|eval\(|new Function|innerHTML", text), name
    page = FILES[PAGE].content.decode()
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", page)


def test_a_known_page_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/ui")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/ui", headers={"if-none-match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/ui", headers={"if-none-match": '"other"'}).status_code == 200
    head = client.head("/ui/style.css")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len(FILES["style.css"].content)
    error_of(client.post("/ui"), 405, "method_not_allowed")


def test_an_address_alone_leads_to_the_page(client: TestClient) -> None:
    for address in ("/", "/ui/"):
        answer = client.get(address, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, "/ui")


def test_the_page_is_public_and_holds_no_data(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, api_keys="secret")) as client:
        assert client.get("/ui").status_code == 200
        error_of(client.get("/info"), 401, "missing_api_key")


class Elements(html.parser.HTMLParser):
    """All elements with their attributes and the label element around them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.labelled: set[int] = set()
        self.open: list[str] = []
        self.texts: dict[int, str] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if "label" in self.open:
            self.labelled.add(len(self.found))
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, text: str) -> None:
        last = len(self.found) - 1
        self.texts[last] = self.texts.get(last, "") + text.strip()


def test_every_control_has_a_name_and_every_reference_an_end() -> None:
    seen = Elements()
    seen.feed(FILES[PAGE].content.decode())
    assert seen.open == []
    ids = [about["id"] for _, about in seen.found if "id" in about]
    assert len(ids) == len(set(ids))
    labels = {about.get("for") for tag, about in seen.found if tag == "label"}
    for place, (tag, about) in enumerate(seen.found):
        for name in ("for", "aria-labelledby", "aria-describedby"):
            assert set((about.get(name) or "").split()) <= set(ids), about
        if tag in CONTROLS and about.get("aria-hidden") != "true":
            named = about.get("aria-label") or about.get("id") in labels or place in seen.labelled
            assert named or (tag == "button" and seen.texts.get(place)), (tag, about)
        if tag == "img":
            assert "alt" in about
    tags = dict(seen.found)
    assert tags["html"]["lang"] == "en"
    assert "main" in tags
    assert any(about.get("aria-live") == "polite" for _, about in seen.found)
    assert ("a", {"class": "skip", "href": "#main"}) in seen.found


def test_colours_are_told_apart_by_everybody() -> None:
    """WCAG 2.2: 4.5 for text, 3 for what is drawn, on every ground it stands on, in both schemes."""
    style = FILES["style.css"].content.decode()
    parts = style.split("prefers-color-scheme: dark")[:2]
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in parts)
    for scheme in (light, light | dark):
        for ground in ("ground", "card", "tint", "bad"):
            assert contrast(scheme["ink"], scheme[ground]) >= 7
            assert contrast(scheme["quiet"], scheme[ground]) >= 4.5
            assert contrast(scheme["accent"], scheme[ground]) >= 4.5
        assert contrast(scheme["on-accent"], scheme["accent"]) >= 4.5
        for drawn in ("hit", "missed", "spare", "focus", "edge"):
            assert contrast(scheme[drawn], scheme["card"]) >= 3, drawn


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
