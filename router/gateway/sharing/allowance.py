"""What requests take of a gateway's capacity: places among those in flight, and bytes for their bodies."""

from router.gateway.errors import ApiError, overloaded
from router.shared_limit import SharedLimit


class Capacity:
    """What one gateway process has to share. Belongs to one event loop."""

    def __init__(self, max_in_flight: int, max_held_bytes: int, max_body_bytes: int) -> None:
        """`max_held_bytes` is for the bodies of all requests in flight, `max_body_bytes` for a single one."""
        self.requests = SharedLimit(max_in_flight)
        self.body_bytes = SharedLimit(max_held_bytes)
        self.max_body_bytes = max_body_bytes


class Allowance:
    """What one request has taken, in the name of one share: a client, or an address while its client is unknown."""

    def __init__(self, capacity: Capacity) -> None:
        self.share = "-"
        self._capacity = capacity
        self._has_place = False
        self._held_bytes = 0

    def enter(self, share: str) -> None:
        """Takes a place for `share`. Raises `ApiError` 429 if it has all that it may have."""
        requests = self._capacity.requests
        self.share = share
        self._has_place = requests.take(share)
        if not self._has_place:
            raise overloaded(f"too many requests in flight: {requests.held(share)} of this client")

    def hold(self, size: int) -> None:
        """The body has `size` bytes or more. Raises `ApiError` 413 or 429 if that is too much."""
        capacity = self._capacity
        if size > capacity.max_body_bytes:
            raise ApiError(
                413, f"the body is larger than {capacity.max_body_bytes} bytes", code="body_too_large"
            )
        more = max(0, size - self._held_bytes)
        if not capacity.body_bytes.take(self.share, more):
            held = capacity.body_bytes.held(self.share)
            raise overloaded(f"too many bytes of requests in flight: {held} of this client")
        self._held_bytes += more

    def move(self, share: str) -> None:
        """From here on everything counts for `share`. Raises `ApiError` as above."""
        size = self._held_bytes
        self.release()
        self.enter(share)
        self.hold(size)

    def release(self) -> None:
        if self._has_place:
            self._capacity.requests.give(self.share)
        self._capacity.body_bytes.give(self.share, self._held_bytes)
        self._has_place, self._held_bytes = False, 0
