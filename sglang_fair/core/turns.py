"""Whose turn it is, for policies under which one client at a time has its turn (`Policy.turns`)."""

from collections.abc import Mapping


class OneTurn:
    """Tells what has changed since it was asked last. O(clients that have begun to wait)."""

    def __init__(self) -> None:
        self._changed: dict[str, bool] = {}
        self._has_turn: str | None = None
        """The client that had it when somebody asked last."""

    def begins(self, client: str) -> None:
        """`client` begins to wait."""
        self._changed[client] = False

    def ends(self, client: str) -> None:
        """`client` waits no more."""
        self._changed.pop(client, None)

    def changes(self, first: str | None) -> Mapping[str, bool]:
        """The answer of `Policy.turns`; `first` has its turn now."""
        changed, self._changed = self._changed, {}
        before = self._has_turn
        if before is not None and before != first:
            changed[before] = False
        if first is not None:
            changed[first] = True
        self._has_turn = first
        return changed
