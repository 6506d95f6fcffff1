"""Similarity search: the vectors of a collection that are nearest to a query, exact under any filter.

>>> scores, ids = accelerant.search.exact(queries, data, k=10, metric="cosine", mask=in_stock)

The collection stays where it is: NumPy's and torch's arrays, of the host or of a device, need no index; a `Collection`
mirrors the vectors that Qdrant holds, and a `DocumentIndex` those of the chunks of documents.
"""

from typing import TYPE_CHECKING

from accelerant._lazy import lazy
from accelerant.search.arrays import Hits
from accelerant.search.exact import exact, recall

if TYPE_CHECKING:
    from accelerant.search.collection import Collection, Matches
    from accelerant.search.documents import DocumentIndex, Indexed, Source

__all__ = ["Collection", "DocumentIndex", "Hits", "Indexed", "Matches", "Source", "exact", "recall"]

if not TYPE_CHECKING:  # a type checker has the imports above
    _NAMES = {"collection": ("Collection", "Matches"), "documents": ("DocumentIndex", "Indexed", "Source")}
    __getattr__, __dir__ = lazy(__name__, __all__, _NAMES)
