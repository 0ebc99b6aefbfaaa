"""Where a replica's ranks meet: on this machine alone, unless they are on several.

SGLang has them meet at the address that the replica serves at, and PyTorch's store, which holds that meeting, listens
at all of a machine's addresses and asks nobody who he is. So ranks of one machine meet at its loopback address, and the
store gets a socket that listens there. Gloo, which connects them, is told the same. A replica that spans machines
(`--dist-init-addr`) is left as it is: there the network must be closed to others.
"""

import os
import socket
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any

from sglang.srt.runtime_context import get_parallel

from sglang_fair.common.listening import is_loopback

LOCAL = "127.0.0.1"

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"

BACKLOG = 1024


def is_alone(parallel: Any) -> bool:
    """Whether all ranks are on this machine."""
    return parallel.nnodes == 1 and not parallel.dist_init_addr


def meet_here(result: str, *args: Any, **kwargs: Any) -> str:
    """After SGLang's choice of where ranks meet."""
    scheme, separator, rest = result.partition("://")
    _, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not separator or not colon or not is_alone(get_parallel()):
        return result
    return f"tcp://{LOCAL}:{port}"


def make_store(
    original: Callable[..., Any],
    hostname: str,
    port: int,
    rank: int,
    world_size: int | None,
    timeout: timedelta,
    use_libuv: bool = True,
) -> Any:
    """Around PyTorch's making of the store. The rank that has it gives it a socket of its own."""
    if rank != 0 or port == 0 or not is_loopback(hostname):
        return original(hostname, port, rank, world_size, timeout, use_libuv)
    from torch.distributed import TCPStore

    listener = socket.create_server((hostname, port), backlog=BACKLOG)
    return TCPStore(
        host_name=hostname,
        port=port,
        world_size=world_size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),  # the store closes it
        use_libuv=use_libuv,
    )


def connect_here(parallel: Any, environ: MutableMapping[str, str] = os.environ) -> None:
    """Has the ranks of one machine connect on it alone. What the operator has set stays."""
    if is_alone(parallel):
        environ.setdefault(GLOO_VARIABLE, "lo")
