"""Chromium without a window, driven by the DevTools protocol: pages, keys, and pictures of them."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request

from requirements import require

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0", "--no-first-run",
]  # fmt: skip
KEYS = {"Tab": 9, "Enter": 13, " ": 32}


class Page:
    """A page of a browser."""

    def __init__(self, connection):
        self._connection = connection
        self._numbers = itertools.count(1)
        self.problems = []  # exceptions, and messages of the console that are errors
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=120))
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(message["params"]["exceptionDetails"]["exception"].get("description"))
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(message["params"]["entry"]["text"])
            elif message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]

    def evaluate(self, expression):
        """Return the value of an expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]["exception"]["description"]
        return found["result"].get("value")

    def wait(self, expression, seconds=120):
        """Return the value of an expression once it is true."""
        until = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < until, f"not true in {seconds} s: {expression}; {self.problems}"
            time.sleep(0.05)
        return value

    def look(self, width, height, scheme="light"):
        """Set the size of the window and the system's colors."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r" if key == "Enter" else key} if key != "Tab" and kind == "keyDown" else {}
            code = KEYS[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self, path):
        """Write the whole page as a PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def open_page(address, folder):
    """Start Chromium with a page; folder is for its profile."""
    from websockets.sync.client import connect

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    require("" if chromium else "Chromium is not installed; scripts/ci-setup installs it from Debian")
    command = [chromium, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ports = folder / "DevToolsActivePort"
        until = time.monotonic() + 120
        while not (ports.exists() and ports.read_text().strip()):
            assert browser.poll() is None, "Chromium ended"
            assert time.monotonic() < until, "Chromium does not listen"
            time.sleep(0.05)
        port = ports.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=60) as answer:
            target = next(one for one in json.load(answer) if one["type"] == "page")
        with connect(target["webSocketDebuggerUrl"], max_size=1 << 28) as connection:
            page = Page(connection)
            page.call("Page.navigate", url=address)
            yield page
    finally:
        browser.terminate()
        browser.wait(timeout=30)
