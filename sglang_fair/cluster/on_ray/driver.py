"""What is asked of Ray. No other module imports it, and this one only when it is asked to connect.

Ray's own words: a *driver* is the process that asks; a *bundle* is what is kept free on one node; a *placement group*
is bundles that are had together; an *actor* is an object in a process on a node, which Ray starts again when that dies.
Neither actors nor groups are detached: they end with the driver.
"""

import asyncio
import contextlib
import logging
import os
import socket
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from sglang_fair.cluster.on_ray.host import Host, News
from sglang_fair.cluster.on_ray.states import Place
from sglang_fair.cluster.on_ray.told import actor_options, shortage
from sglang_fair.cluster.plan import Asked

CONNECT_S = 5.0
STEP_S = 1.0
MISSING = "--ray needs the package ray: pip install 'sglang-fair[ray]'"


class RayFailed(RuntimeError):
    """Ray cannot do what was asked; the text is one line."""


class Gone(RuntimeError):
    """An actor does not answer; Ray starts it again."""


class HostFailed(RuntimeError):
    """A replica's process could not be started on its node; the text is one line."""


class Actor(Protocol):
    """A `Host` somewhere. Its methods are those of `Host`; they raise `Gone`, and `RayFailed` if Ray will not start it
    again."""

    async def place(self) -> Place:
        """Raises `HostFailed`, too."""
        ...

    async def news(self, seen: int) -> News: ...

    async def stop(self) -> None: ...

    async def leave(self) -> None: ...

    def kill(self) -> None:
        """Ends it for good."""
        ...


class Room(Protocol):
    """Bundles that are kept free."""

    def actor(self, index: int, asked: Asked) -> Actor:
        """Has a replica in the bundle of this number."""
        ...

    def give_back(self) -> None:
        """They are free for others."""
        ...


class Cloud(Protocol):
    """Where replicas can be."""

    async def room(self, count: int) -> Room:
        """Keeps `count` bundles free. Raises `RayFailed` if there is no room in time."""
        ...


def is_installed() -> bool:
    """Whether there is Ray here."""
    return find_spec("ray") is not None


def whereabouts() -> tuple[str, str]:
    """Of this process of Ray's: its node's address, and what the node is called."""
    ray: Any = import_module("ray")
    address = ray.util.get_node_ip_address()
    return address, f"{address} ({ray.get_runtime_context().get_node_id()[:8]})"


class Ray:
    """A cluster of Ray's, and we are its driver."""

    def __init__(
        self,
        address: str,
        bundle: Mapping[str, float],
        wait_s: float,
        loads: bool,
        carried: Mapping[str, str],
    ) -> None:
        """Connects, which takes seconds. Raises `RayFailed`."""
        _reach(address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray warns of its own future ways, which we do not use.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        ray: Any = import_module("ray")  # what mypy finds in it is typed in part
        self._ray, self._address = ray, address
        self._bundle, self._wait_s, self._loads, self._carried = dict(bundle), wait_s, loads, dict(carried)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, SystemExit) as error:
            raise RayFailed(f"the Ray cluster at {address} cannot be used: {_line(error)}") from None

    async def room(self, count: int) -> "_Group":
        """Keeps `count` bundles free, on as many nodes as there are. Raises `RayFailed`."""
        from ray.util.placement_group import placement_group

        group = placement_group([self._bundle] * count, strategy="SPREAD")
        try:
            is_there = await self._is_there(group)
        except BaseException:
            _remove(group)
            raise
        if not is_there:
            nodes = {
                f"{node['NodeManagerAddress']}": node["Resources"]
                for node in self._ray.nodes()
                if node["Alive"]
            }
            free = self._ray.available_resources()
            _remove(group)
            raise RayFailed(shortage(self._address, count, self._bundle, nodes, free, self._wait_s))
        return _Group(self, group)

    async def _is_there(self, group: Any) -> bool:
        """Waits for a group in steps, so that who is asked to stop need not wait for it."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._wait_s
        while (left_s := until_s - loop.time()) > 0:
            if await asyncio.to_thread(group.wait, min(left_s, STEP_S)):
                return True
        return False

    def actor(self, group: Any, index: int, asked: Asked) -> "_Actor":
        """A `Host` in a bundle of a placement group."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        made = self._ray.remote(Host).options(
            **actor_options(self._bundle),
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        return _Actor(self._ray, made.remote(asked, self._carried, whereabouts, loads=self._loads))

    def close(self) -> None:
        """Ends whatever of ours is left in the cluster."""
        self._ray.shutdown()


class _Group:
    def __init__(self, cluster: Ray, group: Any) -> None:
        self._cluster = cluster
        self._group = group

    def actor(self, index: int, asked: Asked) -> "_Actor":
        return self._cluster.actor(self._group, index, asked)

    def give_back(self) -> None:
        _remove(self._group)


class _Actor:
    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray = ray
        self._handle = handle

    async def place(self) -> Place:
        found: Place = await self._ask("place")
        return found

    async def news(self, seen: int) -> News:
        found: News = await self._ask("news", seen)
        return found

    async def stop(self) -> None:
        await self._ask("stop")

    async def leave(self) -> None:
        await self._ask("leave")

    def kill(self) -> None:
        self._ray.kill(self._handle, no_restart=True)

    async def _ask(self, method: str, *arguments: object) -> Any:
        raised = self._ray.exceptions
        try:
            return await getattr(self._handle, method).remote(*arguments)
        except raised.RayTaskError as error:
            raise HostFailed(_line(error.cause)) from None
        except raised.ActorUnavailableError as error:
            raise Gone(_line(error)) from None
        except raised.RayError as error:
            raise RayFailed(f"Ray gives a replica up: {_line(error)}") from None


def _reach(address: str) -> None:
    """Raises `RayFailed` if nobody listens there. Ray itself would try for more than a minute."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return  # "auto", or what Ray refuses by itself
    if not port.isdecimal():
        raise RayFailed(f"--ray {address} is not auto or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise RayFailed(f"no Ray cluster answers at {address}: {why}") from None


def _remove(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    with contextlib.suppress(Exception):  # it is gone with its cluster
        remove_placement_group(group)


def _line(error: BaseException) -> str:
    """What Ray says over many lines, in one."""
    return " ".join(str(error).split())[:600] or type(error).__name__
