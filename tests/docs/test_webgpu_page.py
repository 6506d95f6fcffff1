"""docs/webgpu.html: written from the package's WGSL, and run by Chromium, whose device in software is SwiftShader."""

import importlib.util
import json
import queue
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

import accelerant as acl
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.program import entries, kernel_source
from accelerant.algebra.ntt.plan import Tile, Variant, powers_source
from accelerant.algebra.ntt.plan import kernel_source as pass_source
from accelerant.nn import GPT, GPTConfig
from accelerant.runtime import registry
from requirements import require, require_backend

ROOT = Path(__file__).parents[2]
FLAGS = ["--headless", "--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]


def written():
    spec = importlib.util.spec_from_file_location("webgpu_page", ROOT / "scripts" / "webgpu_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page()


def test_the_page_is_what_the_package_gives():
    assert (ROOT / "docs" / "webgpu.html").read_text() == written(), "run scripts/webgpu_page.py"


def report_of(text, folder):
    """What the page reports from Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    require("" if chromium else "Chromium is not installed; scripts/ci-setup installs it from Debian")
    reports = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode() if self.path.startswith("/page") else b"")

        def do_POST(self):
            reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://localhost:{server.server_port}/page?report=/report"
    browser = subprocess.Popen(
        [chromium, *FLAGS, f"--user-data-dir={folder}", address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return reports.get(timeout=120)
    finally:
        browser.terminate()
        browser.wait(timeout=30)
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_chromium_computes_what_the_page_expects(tmp_path):
    found = report_of((ROOT / "docs" / "webgpu.html").read_text(), tmp_path)
    assert "error" not in found, found
    assert "swiftshader" in found["state"].lower()
    names = ["matmul", "field_mul goldilocks", "field_mul babybear", "field_mul bn254_fr"]
    assert [check["kernel"] for check in found["checks"]] == names
    assert [check["passed"] for check in found["checks"]] == [True] * 4, found
    assert 0 < found["checks"][0]["worst"] < 2e-5


@pytest.mark.slow
def test_the_page_says_which_kernel_is_wrong(tmp_path):
    """Without a carry in the products of digits, and with a wrong step of the tiles."""
    text = (ROOT / "docs" / "webgpu.html").read_text()
    damaged = text.replace("carry = (t[0] + m * MODULUS[0]) >> 16u;", "carry = 0u;")
    damaged = damaged.replace("row + 16 * part] * b;", "row + 8 * part] * b;")
    found = report_of(damaged, tmp_path)
    assert [check["passed"] for check in found["checks"]] == [False] * 4, found


COMPILES = """
<script>
(async () => {
  const device = await (await navigator.gpu.requestAdapter()).requestDevice(), errors = [];
  for (const code of MODULES) {
    const { messages } = await device.createShaderModule({ code }).getCompilationInfo();
    for (const { type, lineNum, message } of messages) {
      if (type === "error") errors.push([message, code.split("\\n")[lineNum - 1]]);
    }
  }
  return errors;
})().catch((error) => [String(error)]).then((errors) => {
  fetch("/report", { method: "POST", body: JSON.stringify({ errors }) });
});
</script>
"""


def modules():
    """The WGSL of integer kernels, and what a training step of a small GPT has compiled."""
    fields = [FIELDS[name] for name in ("goldilocks", "babybear", "bn254_fr")]
    sources = [kernel_source(field, entry) for field in fields for entry in entries(field)]
    split = Variant(reversed_in=True, before=True, after=True, twiddle="before", split=True)
    for field in fields:
        sources += [powers_source(field), pass_source(field, Variant(along_in=True), Tile(6, 3, 1))]
        sources += [pass_source(field, split, Tile(8, 1, 1))]
    model = acl.to(GPT(GPTConfig(vocab_size=50, context=8, layers=1, heads=2, width=16)), "webgpu")
    tokens = acl.to(torch.randint(0, 50, (2, 8)), "webgpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(tokens, tokens).backward()
    optimizer.step()
    assert torch.equal(((tokens + 1) // 3 % 2).bool().sum(1).float().cpu() * 0, torch.zeros(2))  # int64, too
    compiled = [text for text in registry.create("webgpu")._devices[0]._modules if "fn acl_max" in text]
    assert len(compiled) > 20
    return [source.dialects["wgsl"] for source in sources] + compiled


@pytest.mark.slow
def test_the_browsers_compiler_takes_every_kernel(tmp_path):
    """It is stricter than wgpu's."""
    require_backend("webgpu")
    text = json.dumps(modules()).replace("<", "\\u003c")
    found = report_of(COMPILES.replace("MODULES", text), tmp_path)
    assert found == {"errors": []}
    damaged = COMPILES.replace("MODULES", json.dumps(["fn f(a: u32) -> u32 { return a | a << 1u; }"]))
    assert "parenthesis" in report_of(damaged, tmp_path)["errors"][0][0]
