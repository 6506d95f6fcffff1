"""Make the pictures of the documentation.

usage: scripts/pictures.py architecture     docs/architecture.svg, from the layers that pyproject.toml declares
       scripts/pictures.py report           docs/report.png: trains the preset tiny, and takes a picture with Chromium

The chart of the README is made by `python -m benchmarks.readme_chart`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from accelerant.runtime import registry

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "accelerant"

CAPTIONS = {
    "cli": "train, serve, bench, tune, ...",
    "service": "HTTP, jobs, keys, dashboard",
    "bench": "timers, suites, reports",
    "accelerator": "any array library, fuse",
    "privacy": "dp, he, mpc",
    "zk": "Groth16, files",
    "distributed": "split models",
    "search": "vectors",
    "nn": "layers, models, train, patching; no kernels",
    "tensors": "torch tensors on OpenCL and WebGPU",
    "ops": "one folder per tensor op",
    "algebra": "field, ntt, curve, msm, bigint",
    "runtime": "dispatch, ledger, compilation, memory, streams",
    "config": "settings",
    "errors": "one tree of exceptions",
}
"""What a folder or module contains; those that do not exist yet are drawn as planned."""

LEFT, WIDTH, GAP = 32, 428, 12

HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 802" role="img" aria-labelledby="title desc">
  <title id="title">Accelerant's layers, and one call through them</title>
  <desc id="desc">On the left the layers of the package, each importing only those below it: $layers. Dashed ones
    are planned. On the right the path of a call: the op checks its arguments, dispatch chooses an implementation, the
    kernel is compiled or comes from the disk cache, the provider launches it, and the ledger counts it. Below it the
    places of an op, a backend, a curve, a form of Hugging Face and an operation of the service.</desc>
"""

STYLE = """  <style>
    .page { fill: #ffffff; stroke: #d7dde6; }
    .box { fill: #eef3fd; stroke: #3b6fe0; }
    .base { fill: #e9f6f1; stroke: #0f9d76; }
    .note { fill: #fdf1e8; stroke: #d9631e; }
    .plan { fill: none; stroke: #8a96a8; stroke-dasharray: 5 4; }
    .box, .base, .note, .plan { stroke-width: 1.4; }
    text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1b2330; font-size: 15px; }
    .head { font-size: 17px; font-weight: 600; }
    .name { font-weight: 600; text-anchor: middle; }
    .left { font-weight: 600; }
    .soft { fill: #5a677a; font-size: 13px; }
    .mid { text-anchor: middle; }
    .code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 14px; }
    .line { fill: none; stroke: #5a677a; stroke-width: 1.6; }
    .tip { fill: #5a677a; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #141a23; stroke: #2a3342; }
      .box { fill: #1b2740; stroke: #7aa5ff; }
      .base { fill: #16302a; stroke: #3fd2a4; }
      .note { fill: #33241a; stroke: #ff9a57; }
      .plan { stroke: #7b899c; }
      text { fill: #e6eaf1; }
      .soft { fill: #9fabbd; }
      .line { stroke: #9fabbd; }
      .tip { fill: #9fabbd; }
    }
  </style>
  <defs>
    <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
      <path class="tip" d="M0 0 L8 4 L0 8 Z"/>
    </marker>
  </defs>
  <rect class="page" x="1" y="1" width="998" height="800" rx="14"/>

"""

CALL = """  <path class="line" d="M478 70 V764" marker-end="url(#tip)"/>

  <!-- one call -->
  <text class="head" x="528" y="44">One call</text>
  <text class="code" x="616" y="44">ops.layer_norm(x, w, b)</text>

  <rect class="box" x="528" y="64" width="278" height="74" rx="8"/>
  <text class="left" x="546" y="90">the op</text>
  <text class="soft" x="546" y="110">checks shapes and dtypes;</text>
  <text class="soft" x="546" y="127">raises before the device is touched</text>

  <rect class="base" x="528" y="170" width="278" height="74" rx="8"/>
  <text class="left" x="546" y="196">dispatch</text>
  <text class="soft" x="546" y="216">forced, raced, shipped table, or</text>
  <text class="soft" x="546" y="233">first in order; the choice is kept</text>

  <rect class="box" x="528" y="290" width="132" height="62" rx="8"/>
  <text class="name" x="594" y="316">own kernel</text>
  <text class="soft mid" x="594" y="336">Triton, C, LLVM</text>
  <rect class="box" x="674" y="290" width="132" height="62" rx="8"/>
  <text class="name" x="740" y="316">library</text>
  <text class="soft mid" x="740" y="336">torch; the fallback</text>

  <rect class="base" x="528" y="398" width="278" height="74" rx="8"/>
  <text class="left" x="546" y="424">provider: compile</text>
  <text class="soft" x="546" y="444">source to machine code, once;</text>
  <text class="soft" x="546" y="461">then from the disk cache</text>

  <rect class="base" x="528" y="516" width="278" height="92" rx="8"/>
  <text class="left" x="546" y="542">provider: launch</text>
  <text class="soft" x="546" y="562">cuda: the driver, on torch's stream</text>
  <text class="soft" x="546" y="579">does not wait for the device</text>
  <text class="soft" x="546" y="596">cpu: the range is split over the cores</text>

  <rect class="note" x="850" y="146" width="118" height="122" rx="8"/>
  <text class="name" x="909" y="173">ledger</text>
  <text class="soft mid" x="909" y="195">calls, bytes,</text>
  <text class="soft mid" x="909" y="212">flops, sampled</text>
  <text class="soft mid" x="909" y="229">times, refusals,</text>
  <text class="soft mid" x="909" y="246">fallbacks</text>

  <path class="line" d="M667 138 V168" marker-end="url(#tip)"/>
  <path class="line" d="M594 244 V288" marker-end="url(#tip)"/>
  <path class="line" d="M740 244 V288" marker-end="url(#tip)"/>
  <path class="line" d="M594 352 V396" marker-end="url(#tip)"/>
  <path class="line" d="M667 472 V514" marker-end="url(#tip)"/>
  <path class="line" d="M806 207 H848" marker-end="url(#tip)"/>
  <text class="soft" x="752" y="272">or</text>

  <text class="head" x="528" y="658">Where things go</text>
  <text class="soft" x="528" y="684">an op</text>
  <text class="code" x="690" y="684">ops/NAME/, ops/__init__.py</text>
  <text class="soft" x="528" y="704">a backend</text>
  <text class="code" x="690" y="704">runtime/providers/, tensors/</text>
  <text class="soft" x="528" y="724">a curve</text>
  <text class="code" x="690" y="724">algebra/{curve,field}/parameters.py</text>
  <text class="soft" x="528" y="744">a Hugging Face form</text>
  <text class="code" x="690" y="744">nn/patching/forms.py</text>
  <text class="soft" x="528" y="764">a service operation</text>
  <text class="code" x="690" y="764">service/operations.py</text>
</svg>
"""
"""The right half: one call, by name of the parts that it passes."""


def layers() -> list[list[str]]:
    """Return the rows of the drawing: the layers that import-linter checks, the lowest two in one row."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [each for each in project["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    rows = [re.findall(r"[a-z]\w*", layer) for layer in contract["layers"]]
    *upper, config, errors = [[name for name in row if name != "version"] for row in rows]
    return [*upper, config + errors]


def boxes(row: Sequence[str], top: int, height: int) -> list[str]:
    """Return the boxes of a layer, side by side."""
    width = (WIDTH - GAP * (len(row) - 1)) / len(row)
    parts = []
    for place, name in enumerate(row):
        exists = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()
        kind = "plan" if not exists else "base" if name in ("runtime", "config", "errors") else "box"
        x = LEFT + place * (width + GAP)
        middle, caption = x + width / 2, CAPTIONS[name] if exists else "planned"
        parts += [
            f'  <rect class="{kind}" x="{x:g}" y="{top}" width="{width:g}" height="{height}" rx="8"/>',
            f'  <text class="name" x="{middle:g}" y="{top + 25}">{name}</text>',
            f'  <text class="soft mid" x="{middle:g}" y="{top + 45}">{escape(caption)}</text>',
        ]
    return parts


def providers(top: int) -> list[str]:
    """Return the boxes of the providers, inside of the runtime: those with kernels, and the others in one."""
    own = [name for name in registry.PROVIDERS if registry._provider_class(name).dialects]
    others = [name for name in registry.PROVIDERS if name not in own]
    parts = []
    for place, (name, width) in enumerate([*((name, 60) for name in own), (", ".join(others), 80)]):
        x = LEFT + GAP + 66 * place
        parts += [
            f'  <rect class="box" x="{x}" y="{top}" width="{width}" height="34" rx="6"/>',
            f'  <text class="soft mid" x="{x + width // 2}" y="{top + 22}">{name}</text>',
        ]
    return parts


def architecture() -> str:
    """Return the drawing of the layers and of one call."""
    rows = layers()
    names = "; ".join(" and ".join(row) for row in rows)
    parts = [HEAD.replace("$layers", names) + STYLE.rstrip("\n")]
    parts.append(f'  <text class="head" x="{LEFT}" y="44">Layers</text>')
    parts.append('  <text class="soft" x="102" y="44">imports go down only</text>')
    top = 64
    for row in rows:
        height = 122 if row == ["runtime"] else 58
        parts += boxes(row, top, height)
        if row == ["runtime"]:
            hooks = "knows no op: the layers above give it what it calls"
            parts.append(f'  <text class="soft mid" x="{LEFT + WIDTH / 2:g}" y="{top + 63}">{hooks}</text>')
            parts += providers(top + 76)
        top += height + 14
    return "\n".join(parts) + "\n" + CALL


def report() -> None:
    """Train the preset tiny, and write the picture of its report."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("no Chromium: install one, for example Debian's package chromium")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accelerant", "train", "--preset", "tiny", "--out", f"{folder}/run"]
        subprocess.run(command, check=True)
        page = Path(folder, "run", "report.html").as_uri()
        picture = ROOT / "docs" / "report.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,1780"]
        subprocess.run([browser, *options, f"--screenshot={picture}", page], check=True, capture_output=True)


def main() -> None:
    """Make the picture that the argument names."""
    match sys.argv[1:]:
        case ["architecture"]:
            (ROOT / "docs" / "architecture.svg").write_text(architecture(), encoding="utf-8")
        case ["report"]:
            report()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
