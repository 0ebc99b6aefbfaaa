"""Open files: a process may have as many as its hard limit says, not as the soft one does."""

import resource


def raise_limit() -> int:
    """Raises the soft limit to the hard one, for this process and those that it starts; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
