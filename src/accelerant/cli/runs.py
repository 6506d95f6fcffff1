"""`accelerant runs` and `data`: the runs of `accelerant train`, compared and exported; token files."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, TaskID

from accelerant.cli.help import Group, examples, option
from accelerant.cli.terminal import console, is_live
from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import clipped, escaped, plain, write_atomic
from accelerant.runtime.html_page import Line, line_chart, render, smoothed, text_table

if TYPE_CHECKING:
    from accelerant.nn.train.history import StepRecord
    from accelerant.nn.train.tokens import TokenFileInfo

_DATA_EXAMPLES = """\
prepare ~/books --out books.tokens
accelerant data prepare dump.jsonl --out dump.tokens --tokenizer gpt2/tokenizer.json
accelerant train --preset gpt2 --data books.tokens"""

_Paths = Annotated[list[str], typer.Argument(metavar="PATH...", help="Text files, JSONL files, or folders of them.")]
_Out = Annotated[str, typer.Option(metavar="FILE", help="The token file to write.")]
_Tokenizer = Annotated[
    str,
    typer.Option(metavar="bpe|bytes|PATH", help="bpe is trained on a sample of the text; PATH is a tokenizer.json."),
]
_Vocabulary = Annotated[
    int | None, typer.Option("--vocab-size", help="Maximum number of tokens of a trained BPE. Default: 50257.")
]
_Field = Annotated[str, typer.Option("--field", help="Field of each JSON object that contains the text.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")]
_File = Annotated[str, typer.Argument(metavar="FILE", help="A token file.")]
_Check = Annotated[bool, typer.Option("--check", help="Read all tokens and compare them with their checksum.")]


def prepare(
    paths: _Paths, out: _Out, tokenizer: _Tokenizer = "bpe", vocab_size: _Vocabulary = None, field: _Field = "text",
    json_output: _Json = False,
) -> None:  # fmt: skip
    """Turn text into a token file, in memory that does not grow with the text.

    The file gets its name when it is complete; Ctrl-C leaves nothing.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise the library may use a single core
    if vocab_size is not None and tokenizer != "bpe":
        raise ConfigError(f"--vocab-size is for --tokenizer bpe, which is trained; {tokenizer} has its own size")
    from accelerant.nn.train.corpus import prepare_tokens

    with _progress_bar(quiet=json_output) as show:
        info = prepare_tokens(
            [os.path.expanduser(path) for path in paths],
            Path(out).expanduser(),
            tokenizer=tokenizer if tokenizer in ("bpe", "bytes") else os.path.expanduser(tokenizer),
            vocab_size=50257 if vocab_size is None else vocab_size,
            text_field=field,
            watch=show,
            note=lambda text: print(f"accelerant: {text}", file=sys.stderr),
        )
    _print(out, info, json_output)


def info(file: _File, check: _Check = False, json_output: _Json = False) -> None:
    """Describe a token file; with --check, check its tokens."""
    from accelerant.nn.train.tokens import TokenFile

    opened = TokenFile(Path(file).expanduser())
    if check:
        with _progress_bar(quiet=json_output) as show:
            opened.verify(lambda share: show("reading", share))
    _print(file, opened.info, json_output)


def _print(path: str, info: TokenFileInfo, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"path": path, **asdict(info)}))
        return
    print(f"file             {escaped(path)}")
    print(f"tokens           {info.count:,} of a vocabulary of {info.vocab_size:,}, {info.dtype}")
    per_token = info.text_bytes / info.count
    print(f"text             {info.documents:,} documents, {info.text_bytes:,} bytes, {per_token:.2f} a token")
    print(f"tokenizer        {escaped(info.tokenizer)}")
    print(f"source           {escaped(info.source)}")


@contextmanager
def _progress_bar(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows on a terminal to which share, 0 to 1, a phase is done."""
    if quiet or not is_live(sys.stderr):
        yield lambda phase, share: None
        return
    tasks: dict[str, TaskID] = {}
    with Progress(console=console(stderr=True), transient=True) as progress:

        def show(phase: str, share: float) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=1.0)
            progress.update(tasks[phase], completed=share)

        yield show


data = Group("Prepare text for training: token files.", {prepare: _DATA_EXAMPLES, info: "info books.tokens --check"})


_EXAMPLES = """\
accelerant runs
accelerant runs runs/a runs/b
accelerant runs runs/a runs/b --report compared.html
accelerant runs runs/a --export ./my-model"""

_MOST = 6  # colors of a chart
_FIGURES = {
    "steps": "steps done", "tokens": "tokens", "seconds": "time, s", "train_loss": "training loss, nats a token",
    "validation_loss": "held-out loss, nats a token", "validation_nats_per_byte": "held-out loss, nats a byte",
    "bigram_nats_per_byte": "bigram model, nats a byte", "parameters": "parameters", "tokens_per_s": "tokens a second",
    "peak_memory_bytes": "peak memory, bytes", "device": "device",
}  # fmt: skip
"""Fields of summary.json, and their names for people."""


@examples(_EXAMPLES)
def runs(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Folders of runs, or one folder with them. Default: runs."),
    ] = None,
    report: str | None = option("Write a page with the curves of the losses in one plot there.", metavar="FILE"),
    export: str | None = option(
        "Write the run's model and tokenizer there, in the format of transformers.", metavar="DIR"
    ),
    json_output: bool = option("Print one JSON object.", "--json", default=False),
) -> None:
    """List runs of accelerant train, or compare two or more: the settings that differ, and the figures."""
    if export is not None:
        if folders is None or len(folders) != 1:
            raise ConfigError(f"--export takes one run, got {len(folders or ())}")
        from accelerant.nn.train.job import export_run

        export_run(Path(folders[0]).expanduser(), Path(export).expanduser())
        print(json.dumps({"out": export}) if json_output else f"model and tokenizer  {escaped(export)}")
        return
    place = Path(folders[0] if folders else "runs").expanduser()
    listed = not folders or (len(folders) == 1 and not (place / "config.json").exists() and place.is_dir())
    shown = _found(place) if listed else [_ListedRun.read(Path(name).expanduser()) for name in folders or ()]
    if folders and not shown:
        raise FormatError(f"{escaped(place)} holds no run: there is no config.json")
    if not shown and not json_output:
        print("no runs in the folder runs: `accelerant train` makes one; or name the folders of runs")
    differing, note = _differing(shown), _not_comparable(shown)
    if report is not None:
        if not 0 < len(shown) <= _MOST:
            raise ConfigError(f"--report draws 1 to {_MOST} runs, got {len(shown)}")
        if (page := Path(report).expanduser()).suffix != ".html" and (page.parent / "config.json").exists():
            raise ConfigError(f"--report {page} would be among the files of a run: name it *.html")
        write_atomic(page, _page(shown, differing, note).encode())
    if json_output:
        values = {run.name: {"status": run.status, "settings": run.settings, "figures": run.figures} for run in shown}
        print(json.dumps({"runs": values, "differing": differing, "note": note}))
        return
    if listed:
        names = ("steps", "seconds", "validation_nats_per_byte")
        rows = [
            (run.name, run.status, str(run.settings["name"]), *(_text(run.figures.get(name)) for name in names))
            for run in shown
        ]
        head = ("run", "status", "preset", *(_FIGURES[name] for name in names))
        shown_rows = text_table([head, *rows] if rows else [], numbers=head[3:])
    else:
        shown_rows = text_table(_rows(shown, differing))
    print("\n".join(map(escaped, [*shown_rows, *([note] if note and not listed else [])])))
    if report is not None:
        print(f"report  {escaped(report)}")


@dataclass(frozen=True, slots=True)
class _ListedRun:
    """A run's settings, figures and records."""

    name: str
    status: str
    settings: dict[str, Any]
    figures: dict[str, Any]
    records: Sequence[StepRecord]

    @classmethod
    def read(cls, path: Path) -> _ListedRun:
        """Read a run's folder; raise FormatError if it is none."""
        from accelerant.nn.train.config import RunConfig
        from accelerant.nn.train.history import RunFolder, read_metrics

        folder = RunFolder(path)
        config = folder.read_config()
        run = RunConfig.from_dict(config.get("run", {})).to_dict()  # checks every value
        recipe = run.pop("recipe")
        settings = {**recipe, **run, "data": ", ".join(run["data"])}
        for name in ("private", "corpus", "versions"):
            more = config.get(name)
            if isinstance(more, dict):
                flat = {**more, **more.pop("settings", {})} if isinstance(more.get("settings", {}), dict) else more
                settings |= {f"{name} {key}": value for key, value in _shown(flat).items()}
        records = read_metrics(folder.metrics) if folder.metrics.is_file() else []
        done = records[-1].step if records else 0
        figures: dict[str, Any] = {"steps": done}
        held = [record.validation_loss for record in records if record.validation_loss is not None]
        if held:
            figures["validation_loss"] = held[-1]
        if folder.finished:
            summary = folder.read_summary()
            known = _shown(summary)
            figures |= {name: known[name] for name in _FIGURES if name in known}
            if isinstance(private := summary.get("private"), dict):
                figures |= {name: value for name, value in _shown(private).items() if name in ("epsilon", "delta")}
        status = "finished" if folder.finished else f"step {done:,} of {recipe['steps']:,}"
        return cls(str(path), status, settings, figures, records)


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a file of a run that a table can show: texts, and numbers that are finite."""
    return {
        name: value for name, value in values.items()
        if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    }  # fmt: skip


def _found(folder: Path) -> list[_ListedRun]:
    """Return the runs in a folder of runs; those that cannot be read are named on the error stream."""
    found = []
    for path in sorted(folder.glob("*/config.json")):
        try:
            found.append(_ListedRun.read(path.parent))
        except FormatError as error:
            print(f"accelerant: left out: {escaped(error)}", file=sys.stderr)
    return found


def _differing(shown: Sequence[_ListedRun]) -> dict[str, list[Any]]:
    """Return the settings in which the runs differ, and each one's value; None where a run does not have it."""
    names = dict.fromkeys(name for run in shown for name in run.settings)
    values = {name: [run.settings.get(name) for run in shown] for name in names}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def _not_comparable(shown: Sequence[_ListedRun]) -> str:
    """Return why losses do not compare, or an empty text."""
    texts = {(run.settings.get("corpus sha256"), run.settings["seed"], run.settings["context"]) for run in shown}
    notes = []
    if len({(run.settings["tokenizer"], run.settings["vocab_size"]) for run in shown}) > 1:
        notes.append("The tokenizers differ: compare losses a byte, not a token.")
    if len(texts) > 1:
        notes.append("The held-out texts differ, by data, seed or context: so do losses by chance.")
    return " ".join(notes)


def _rows(shown: Sequence[_ListedRun], differing: dict[str, list[Any]]) -> list[tuple[str, ...]]:
    """Return a table: a column for each run, a row for each setting that differs and each figure."""
    labels = {**_FIGURES, "epsilon": "epsilon", "delta": "delta"}
    figures = [name for name in labels if any(name in run.figures for run in shown)]
    return [
        ("", *(run.name for run in shown)),
        ("status", *(run.status for run in shown)),
        *((name.replace("_", " "), *map(_text, values)) for name, values in differing.items()),
        *((labels[name], *(_text(run.figures.get(name), up=name == "epsilon") for run in shown)) for name in figures),
    ]


def _text(value: object, *, up: bool = False) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return plain(value, up=up) if isinstance(value, float) else clipped(value).strip("'\"")


def _page(shown: Sequence[_ListedRun], differing: dict[str, list[Any]], note: str) -> str:
    training, held = [], []
    for number, run in enumerate(shown):
        losses = [(float(record.step), record.loss) for record in run.records]
        training.append(Line(run.name, smoothed(losses, max(1, len(losses) // 40)), f"s{number}"))
        points = [(float(r.step), r.validation_loss) for r in run.records if r.validation_loss is not None]
        if isinstance(last := run.figures.get("validation_loss"), float) and run.status == "finished" and run.records:
            points.append((float(run.records[-1].step), last))
        held.append(Line(run.name, points, f"s{number}", dots=True))
    charts = (("Training loss, smoothed", training), ("Held-out loss", held))
    head, *rows = _rows(shown, differing)
    return render(
        "cli/runs.html",
        title="Runs compared",
        note=note,
        charts=[(name, line_chart(lines, x_label="step", y_label="nats a token")) for name, lines in charts],
        head=head,
        rows=[[("soft", first), *(("wrap", text) for text in rest)] for first, *rest in rows],
    )
