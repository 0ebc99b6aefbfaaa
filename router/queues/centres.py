"""Kinds of requests: centres of their lengths, found by k-means (QLM, Algorithm 1). For the planner's process.

As few as describe the requests: the first number of centres from which a request's lengths are, in the root of the mean
square, within a factor `ALIKE` of its centre's. Logarithms, because lengths spread over orders of magnitude and a tenth
more is as much of a difference for a short request as for a long one.
"""

from collections.abc import Sequence
from math import log

import numpy as np

from router.queues.groups import MOST_KINDS, Centre

ALIKE = 2.0
FEW = 8
"""Requests for each centre at least."""


def centres(points: Sequence[Centre], *, seed: int = 0) -> tuple[Centre, ...]:
    """At most `MOST_KINDS` centres of `points` (`groups.lengths`), in order; none without points. The same for the same
    arguments."""
    from scipy.cluster.vq import ClusterError, kmeans2

    data = np.array(points, float).reshape(-1, 2)
    found: tuple[Centre, ...] = ()
    for count in range(1, MOST_KINDS + 1):
        if count > 1 and len(data) < FEW * count:
            break
        if not len(data):
            return ()
        if count == 1:
            places, labels = data.mean(axis=0)[None, :], np.zeros(len(data), int)
        else:
            try:
                random = np.random.default_rng(seed)
                places, labels = kmeans2(data, count, minit="++", missing="raise", rng=random)
            except ClusterError:  # fewer different points than centres
                break
        used = sorted({int(label) for label in labels})
        found = tuple(sorted((float(places[at, 0]), float(places[at, 1])) for at in used))
        off = ((data - places[labels]) ** 2).sum(axis=1).mean()
        if off <= log(ALIKE) ** 2:
            break
    return found
