"""Work in order: streams, events, copies, chunked streaming, captured CUDA graphs."""

from accelerant._lazy import lazy

TYPE_CHECKING = False  # of typing, whose import takes long: see accelerant/__init__.py
if TYPE_CHECKING:
    from accelerant.runtime.provider import Event
    from accelerant.runtime.streams.graphs import Graph, ahead_of_capture, captures_ahead, counting
    from accelerant.runtime.streams.stream import WITH_STREAMS, Future, Stream, capturing, cuda_event, submit
    from accelerant.runtime.streams.transfer import (
        ChunkedRun,
        HostArray,
        StagingPool,
        as_host,
        copy_async,
        stream_chunks,
    )

__all__ = [
    "WITH_STREAMS", "ChunkedRun", "Event", "Future", "Graph", "HostArray", "StagingPool", "Stream",
    "ahead_of_capture", "as_host", "captures_ahead", "capturing", "copy_async", "counting", "cuda_event",
    "stream_chunks", "submit",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__, ("stream", "graphs", "transfer"))
