"""`accelerant bench curve`: loss curves of a whole training beside plain PyTorch's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from accelerant.errors import ConfigError

__all__ = ["EPILOG", "curve"]

EPILOG = (
    "Examples:  accelerant bench curve --batch 4 --out runs/curve   |   "
    "accelerant bench curve --preset small --precision bf16 --noise none --out runs/small-curve   |   "
    "accelerant bench curve --out runs/curve --page docs/gpt2.md"
)


def curve(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the record; what is there is not made again.")],
    preset: Annotated[
        str | None, typer.Option(help="tiny, small or gpt2. Default: gpt2 on a GPU, tiny on a CPU.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimiser steps of each run.")] = 2000,
    batch: Annotated[int, typer.Option(min=0, help="Windows in a step; 0: the preset's.")] = 0,
    context: Annotated[int, typer.Option(min=0, help="Tokens in a window; 0: the preset's.")] = 0,
    precision: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Of ours: fp32, bf16, fp8. Default: bf16,fp8 on a GPU, fp32 on a CPU."),
    ] = None,
    noise: Annotated[
        str,
        typer.Option(metavar="LIST", help="Plain PyTorch again: rounded, reseeded (initial weights), or none."),
    ] = "rounded,reseeded",
    data: Annotated[list[str] | None, typer.Option(metavar="stdlib|PATH...", help="Text. Default: stdlib.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of initial weights and batches.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Train nothing: put the figures of --out into this page, between its marks."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of a table.")] = False,
) -> None:
    """Train with plain PyTorch and with ours, from the same weights and batches, and compare the losses.

    Writes curve.json, curve.csv, curve.svg and report.html into a folder. Interrupted, the same command goes on.
    """
    from accelerant.cli.train_view import make_view
    from accelerant.runtime import registry
    from benchmarks import loss_curve_page as curve_page
    from benchmarks.loss_curve import CurveRecord, CurveSettings, run

    if page is not None:
        record = CurveRecord.load(out / "curve.json")
        curve_page.write_curve(out, record)
        image, source = (
            Path(os.path.relpath(out / name, page.parent)).as_posix() for name in ("curve.svg", "curve.json")
        )
        curve_page.update_page(page, curve_page.markdown(record, image, source))
        return
    chosen = registry.choose(device)
    if not chosen.torch_device:
        raise ConfigError(f"--device: training needs cuda or cpu; {device} is not one")
    gpu = chosen.torch_device.startswith("cuda")
    default = "bf16,fp8" if gpu else "fp32"
    settings = CurveSettings(
        preset or ("gpt2" if gpu else "tiny"), steps, batch, context,
        data=tuple(data or ("stdlib",)), seed=seed,
        precisions=_names(default if precision is None else precision), noises=_names(noise),
    )  # fmt: skip
    view = make_view(quiet=json_output)
    try:
        record = run(settings, chosen, out, view)
    finally:
        view.close()
    curve_page.write_curve(out, record)
    print((out / "curve.json").read_text() if json_output else curve_page.table(record))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip() and part.strip() != "none")
