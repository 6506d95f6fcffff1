"""Similarity search: the vectors of a collection that are nearest to a query, exact under any filter.

>>> scores, ids = accelerant.search.exact(queries, data, k=10, metric="cosine", mask=in_stock)

The collection stays where it is: NumPy's and torch's arrays, of the host or of a device, need no index. An `Index`
holds vectors that are added and removed, also in inverted lists and as product-quantized codes; its files are FAISS's.
A `Collection` mirrors the vectors that Qdrant holds, and a `DocumentIndex` those of the chunks of documents.
"""

from typing import TYPE_CHECKING

from accelerant._lazy import lazy
from accelerant.search.arrays import Hits
from accelerant.search.exact import exact, recall

if TYPE_CHECKING:
    from accelerant.search.collection import Collection, Matches
    from accelerant.search.documents import DocumentIndex, Indexed, Source
    from accelerant.search.faiss_files import faiss_read, faiss_write
    from accelerant.search.index import Index

__all__ = [
    "Collection", "DocumentIndex", "Hits", "Index", "Indexed", "Matches", "Source", "exact", "faiss_read",
    "faiss_write", "recall",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker has the imports above
    _NAMES = {
        "collection": ("Collection", "Matches"),
        "documents": ("DocumentIndex", "Indexed", "Source"),
        "faiss_files": ("faiss_read", "faiss_write"),
        "index": ("Index",),
    }
    __getattr__, __dir__ = lazy(__name__, __all__, _NAMES)
