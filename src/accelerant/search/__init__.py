"""Similarity search: the vectors of a collection that are nearest to a query, exact under any filter.

>>> scores, ids = accelerant.search.exact(queries, data, k=10, metric="cosine", mask=in_stock)

The collection stays where it is: NumPy's and torch's arrays, of the host or of a device, need no index, and a
`Collection` mirrors the vectors that Qdrant holds.
"""

from accelerant.search.arrays import Hits
from accelerant.search.collection import Collection, Matches
from accelerant.search.exact import exact, recall

__all__ = ["Collection", "Hits", "Matches", "exact", "recall"]
