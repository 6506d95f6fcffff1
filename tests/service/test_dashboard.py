"""The dashboard in Chromium, on a running service; its pictures are in runs/dashboard."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from browser import open_page
from serving import Server

import accelerant.service.dashboard as dashboard
from accelerant.service import Client
from accelerant.service.errors import Cancelled
from accelerant.service.keys import KeyStore

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "runs" / "dashboard"
FOLDER = Path(dashboard.__file__).parent

READY = "document.getElementById('link')?.dataset.state === 'live' && !!document.querySelector('#ledger-rows tr')"

CONTRAST = """
(() => {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (color, below) => {  // a color, which may be translucent, as it looks
    probe.fillStyle = `rgb(${below})`; probe.fillRect(0, 0, 1, 1);
    probe.fillStyle = color; probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const light = (color) => color.map((c) => c / 255).map((c) => (c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = (element) => element
    ? over(getComputedStyle(element).backgroundColor, behind(element.parentElement)) : [255, 255, 255];
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!text || !element.checkVisibility() || element.closest("svg, dialog, option, .skip, :disabled")) continue;
    const ground = behind(element), front = over(getComputedStyle(element).color, ground);
    const [low, high] = [light(ground), light(front)].sort((a, b) => a - b);
    const ratio = (high + .05) / (low + .05);
    if (ratio < 4.5) faint.push(`${element.className} "${element.textContent.slice(0, 30)}": ${ratio.toFixed(2)}`);
  }
  return faint;
})()
"""

FOCUS = """
(() => {
  const element = document.activeElement, style = getComputedStyle(element);
  return { tag: element.tagName, id: element.id, text: element.textContent.trim().slice(0, 20),
           visible: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 };
})()
"""


@pytest.fixture(scope="module")
def page(server, tmp_path_factory):
    with Client(server.url, trust_env=False) as client:
        for operation in ("field_add", "field_mul"):
            for _ in range(4):
                getattr(client, operation)([1, 2], [3, 4])
        client.result(client.submit("field_mul", {"x": client.field_add([1], [1]), "y": client.field_add([1], [1])}).id)
    with open_page(f"{server.url}/", tmp_path_factory.mktemp("profile")) as found:
        found.look(1440, 900)
        found.wait(READY)
        found.wait("document.querySelectorAll('.device').length > 0")
        yield found


def test_the_page_shows_what_the_service_has(page):
    text = page.evaluate("document.body.innerText")
    assert "cpu:0" in page.evaluate("document.querySelector('.device').innerText")
    assert "succeeded" in page.evaluate("document.getElementById('job-list').innerText")
    assert page.wait("document.querySelectorAll('.histogram').length") >= 2
    assert "field_mul" in page.evaluate("document.getElementById('ledger-rows').innerText")
    assert "NaN" not in text
    assert "undefined" not in text
    assert page.problems == []


@pytest.mark.parametrize(("operation", "field", "x", "expected"), [
    ("field_mul", "bn254_fr", "2, 3, 4, 5", "10, 18, 28, 40"),
    ("field_sub", "babybear", "0, 7, 8, 9", "2013265916, 1, 1, 1"),
    ("ntt", "goldilocks", "1, 2, 3, 4", "10, 18446181119461163007, 18446744069414584319, 562949953421310"),
    ("msm", "bn254_g1", "1, 1", "x = 3353031288059533942658390886683067124040920775575537747144343083137631628272"),
])  # fmt: skip
def test_the_form_runs_an_example_that_the_browser_checks(page, operation, field, x, expected):
    page.evaluate(f"""(() => {{
        const choose = (id, value) => {{
            const select = document.getElementById(id);
            select.value = value;
            select.dispatchEvent(new Event("change"));
        }};
        choose("example-operation", "{operation}");
        choose("example-field", "{field}");
        document.getElementById("example-x").value = "{x}";
        document.getElementById("example-result").replaceChildren();
        document.querySelector("#example .main").click();
    }})()""")
    result = page.wait("document.getElementById('example-result').innerText")
    assert "checked in this browser" in result
    assert expected in page.evaluate("document.querySelector('#example-result pre').textContent")


def test_wrong_values_are_named(page):
    page.evaluate("""(() => {
        document.getElementById("example-operation").value = "field_mul";
        document.getElementById("example-operation").dispatchEvent(new Event("change"));
        document.getElementById("example-x").value = "1, <b>two</b>";
        document.getElementById("example-result").replaceChildren();
        document.querySelector("#example .main").click();
    })()""")
    assert "<b>two</b> is not an integer" in page.wait("document.getElementById('example-result').innerText")


def test_a_key_reaches_every_control_and_shows_where_it_is(page):
    page.evaluate("document.activeElement.blur()")
    stops = []
    for _ in range(40):
        page.press("Tab")
        stops.append(page.evaluate(FOCUS))
        if stops[-1]["tag"] == "BODY":
            break
    reached = {stop["id"] or stop["text"] for stop in stops}
    wanted = {
        "Skip to content", "theme", "Failed", "example-operation", "example-field", "example-x", "Run",
        "example-random",
    }  # fmt: skip
    assert wanted <= reached
    assert [stop for stop in stops if stop["tag"] != "BODY" and not stop["visible"]] == []
    page.evaluate("document.querySelector('[data-show=failed]').focus()")
    page.press("Enter")
    assert page.evaluate("document.querySelector('[data-show=failed]').getAttribute('aria-pressed')") == "true"
    page.evaluate("document.querySelector('[data-show=all]').click()")


def test_every_control_has_a_name(page):
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = ("button", "link", "textbox", "combobox", "meter", "progressbar", "image", "list", "table", "region")
    shown = [node for node in nodes if not node["ignored"] and node["role"]["value"] in controls]
    assert len(shown) > 20
    unnamed = [node["role"]["value"] for node in shown if not node.get("name", {}).get("value")]
    assert [role for role in unnamed if role not in ("list", "table")] == []  # these have headings
    page.call("Accessibility.disable")


@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "light"), (390, "dark"), (820, "light"), (1440, "dark"), (2200, "light")]
)
def test_it_fits_and_is_legible(page, width, scheme):
    page.look(width, 900, scheme)
    page.evaluate("window.scrollTo(0, 0); document.activeElement.blur()")
    time.sleep(0.2)
    page.picture(PICTURES / f"{width}-{scheme}.png")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(CONTRAST) == []
    assert page.problems == []
    assert page.evaluate("new Set([...document.querySelectorAll('.top nav a')].map(one => one.offsetHeight)).size") == 1
    note = "document.querySelector('.jobs .note')"
    page.evaluate(f"{note}.textContent = 'a message of many words, '.repeat(9)")
    assert page.evaluate(f"{note}.offsetWidth === {note}.parentElement.offsetWidth")  # the rest is cut off
    if width == 390:  # a table that is wider shows so by shadows, which covers hide at its ends
        table = "document.querySelector('#ledger .scroll')"
        assert page.evaluate(f"{table}.scrollWidth > {table}.clientWidth")
        assert page.evaluate(f"getComputedStyle({table}).backgroundAttachment") == "local, local, scroll, scroll"


def test_the_choice_of_colors_is_kept(page):
    page.look(1440, 900, "light")
    ground = "getComputedStyle(document.body).backgroundColor"
    system = page.evaluate(ground)
    for _ in range(2):
        page.evaluate("document.getElementById('theme').click()")
    assert page.evaluate("document.getElementById('theme').getAttribute('aria-label')") == "Colors: dark"
    assert page.evaluate(ground) != system
    page.call("Page.reload")
    page.wait(READY)
    assert page.evaluate(ground) != system
    page.evaluate("document.getElementById('theme').click()")
    assert page.evaluate(ground) == system


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_apis_page_shows_operations_and_requests(page, server, scheme):
    page.look(390, 844, scheme)
    page.call("Page.navigate", url=f"{server.url}/docs")
    page.wait("document.querySelectorAll('#request-list details').length > 5")
    page.wait("document.querySelectorAll('#operation-list details').length > 5")
    page.evaluate(
        "document.querySelectorAll('#operation-list details, #request-list details').forEach((one) => one.open = true)"
    )
    arrow = "getComputedStyle(document.querySelector('#operation-list summary'), '::before').rotate"
    assert page.evaluate(arrow) == "45deg"  # a row shows that it opens, and that it is open
    page.evaluate("document.querySelector('#operation-list details').open = false")
    assert page.evaluate(arrow) == "-45deg"
    text = page.evaluate("document.body.innerText")
    for expected in (
        "field_mul", "bn254_fr", "goldilocks", "/v2/models/{name}/infer", "/jobs/{id}", "application/octet-stream",
    ):  # fmt: skip
        assert expected in text
    assert "undefined" not in text
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(CONTRAST) == []
    assert page.problems == []
    page.picture(PICTURES / f"docs-390-{scheme}.png")
    page.call("Page.navigate", url=f"{server.url}/")
    page.wait(READY)


def test_a_click_cancels_a_job_that_waits(page, server):
    with Client(server.url, trust_env=False) as client:
        running = client.submit("train", {}, steps=10**6)
        try:
            waiting = client.submit("field_add", {"x": np.arange(4, dtype=np.uint64), "y": np.uint64([1])})
            row = f"document.querySelector('[data-id=\"{waiting.id}\"]')"
            page.wait(f"{row}?.innerText.includes('queued')")
            page.evaluate(f"{row}.querySelector('button').click()")
            page.wait(f"{row}.innerText.includes('cancelled') && !{row}.querySelector('button')")
            assert client.job(waiting.id).state == "cancelled"
            page.wait(f"!!document.querySelector('[data-id=\"{running.id}\"] progress:not([hidden])')")
        finally:
            client.cancel(running.id)  # or the tests that follow wait for it
        with pytest.raises(Cancelled):
            client.result(running.id)


@pytest.mark.slow
def test_a_key_opens_the_page_and_a_stop_ends_its_stream(tmp_path):
    keys = KeyStore(tmp_path / "state" / "keys.json")
    (_, token), (_, other) = keys.create("me", ["monitor", "field"]), keys.create("other", ["field"])
    server = Server(tmp_path / "state", "--device", "cpu")
    with open_page(f"{server.url}/", tmp_path / "profile") as page:
        page.look(390, 844)
        page.wait("document.getElementById('key')?.open")
        page.picture(PICTURES / "key-390-light.png")
        reasons = []
        for given in ("acl_wrong", other, token):
            page.wait("document.getElementById('key').open")
            reasons.append(page.evaluate("document.getElementById('key-reason').innerText"))
            page.evaluate(f"document.getElementById('key-value').value = '{given}'")
            page.evaluate("document.querySelector('#key button').click()")
        page.wait("document.getElementById('link').dataset.state === 'live'")
        assert reasons == [
            "This service demands a key with the scope monitor.",
            "This key is not valid. It may be incomplete, expired or revoked.",
            "This key is valid, but it does not have the scope monitor, which the dashboard needs.",
        ]
        page.evaluate("document.querySelector('#example .main').click()")
        assert "checked" in page.wait("document.getElementById('example-result').innerText")
        assert server.stop() == 0
        page.wait("document.getElementById('link').innerText === 'Reconnecting'")
    assert not [line for line in server.lines if "graceful shutdown" in line]  # the stream did not hold it up
    assert not [line for line in server.lines if token in line]


def test_the_files_load_nothing_from_elsewhere(http):
    for file in FOLDER.iterdir():
        if file.suffix in (".html", ".css", ".js", ".svg") and file.name != "head.html":  # which pages begin with
            pages = {"index.html": "/", "docs.html": "/docs", "prompt.html": "/prompt"}
            name = pages.get(file.name, f"/dashboard/{file.name}")
            answer = http.get(name)
            assert answer.text.endswith(file.read_text(encoding="utf-8")), name
            assert (name in pages.values()) == answer.text.startswith("<!doctype html>"), name
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            outside = set(re.findall(r"https?://[^\s\"')]+", answer.text)) - {"http://www.w3.org/2000/svg"}
            assert not outside, name
    for name in ("__init__.py", "..%2Fapp.py", "nothing.js"):
        assert http.get(f"/dashboard/{name}").status_code == 404
