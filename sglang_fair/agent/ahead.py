"""Which models an agent has read into the page cache before they are needed. Pure."""

from collections.abc import Mapping, Sequence

KEPT_FREE = 0.25
"""Part of the memory that is available which is left alone."""


def read_ahead(
    ahead: Sequence[str], loaded: str, sizes: Mapping[str, int], available_bytes: int
) -> tuple[str, ...]:
    """Of `ahead`, the models that are needed soonest first, those that fit into the memory that is available. What is
    loaded needs no reading. A model that does not fit ends the list: what comes after it is needed later."""
    room = int(available_bytes * (1 - KEPT_FREE))
    chosen: list[str] = []
    for model in dict.fromkeys(ahead):
        if model == loaded or model not in sizes:
            continue
        if sizes[model] > room:
            break
        room -= sizes[model]
        chosen.append(model)
    return tuple(chosen)
