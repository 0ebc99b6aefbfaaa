"""Sets of workers as the bits of an integer."""

from collections.abc import Iterator

_MAX_SETS = 4_000
"""Sets whose names are kept ready; beyond, all are forgotten."""


class WorkerBits:
    """Each worker has one bit; the bit of a worker that is gone is used again."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        """Worker -> bit."""
        self._names: dict[int, str] = {}
        self._sets: dict[int, dict[str, None]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._names)

    def add(self, worker: str) -> int:
        assert worker not in self.of, worker
        bit = 1
        while bit in self._names:
            bit <<= 1
        self.of[worker] = bit
        self._names[bit] = worker
        self._sets.clear()
        return bit

    def remove(self, worker: str) -> None:
        """`worker` is gone. Its bit must not be set anywhere any more."""
        del self._names[self.of.pop(worker)]
        self._sets.clear()

    def names(self, mask: int) -> dict[str, None]:
        """The workers of a mask, in the order of their bits. Not to be changed."""
        names = self._sets.get(mask)
        if names is None:
            if len(self._sets) >= _MAX_SETS:
                self._sets.clear()
            names = self._sets[mask] = dict.fromkeys(self._names[bit] for bit in bits(mask))
        return names


def bits(mask: int) -> Iterator[int]:
    """The bits that are set in `mask`, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
