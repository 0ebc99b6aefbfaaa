"""The limit of open files: the soft limit is often 1024, too few for a router or a gateway."""

import resource


def raise_limit() -> int:
    """Raises the soft limit to the hard one, for this process and its children. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
