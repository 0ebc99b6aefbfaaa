"""Which model is meant: one rule for the router, and for gateways while none answers.

A worker says which model it has, and a request which one it needs; a request goes only to workers that have what it
needs. Peers that know of one model alone say nothing, and mean the only one that there is. Where there are several,
who says nothing is not understood: such a worker gets no requests, such a request no worker.
"""

from collections.abc import Collection


def meant(said: str, known: Collection[str]) -> str | None:
    """The model that a worker or a request means by `said`, "" for nothing, where workers have named the models
    `known`; None: none of them. Where no worker has named any, there is one model, "", however requests call it."""
    if said in known:
        return said
    if not known:
        return ""
    return None if said or len(known) > 1 else next(iter(known))
