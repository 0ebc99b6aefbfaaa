"""Names that nobody can guess, for requests and attempts at them."""

import os

_AT_A_TIME = 256
_left: list[str] = []


def new_id() -> str:
    """32 hexadecimal digits from the system's generator, which takes longer to ask than all else here: it is asked for
    many at a time. Not for a process that forks."""
    if not _left:
        drawn = os.urandom(16 * _AT_A_TIME).hex()
        _left.extend(drawn[at : at + 32] for at in range(0, len(drawn), 32))
    return _left.pop()
