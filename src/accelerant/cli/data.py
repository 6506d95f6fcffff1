"""`accelerant data`: token files, for corpora larger than memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID

from accelerant.cli.help import Group
from accelerant.cli.terminal import console, is_live
from accelerant.errors import ConfigError
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    from accelerant.nn.train.tokens import TokenFileInfo

_EXAMPLES = """\
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


data = Group("Prepare text for training: token files.", {prepare: _EXAMPLES, info: "info books.tokens --check"})
