"""Networks of a test's own: whether this process may make them."""

import shutil
import subprocess


def may_unshare() -> bool:
    """Whether it may make a network and mount files there (unshare -rmn)."""
    tool = shutil.which("unshare")
    return (
        tool is not None
        and not subprocess.run(
            [tool, "-rmn", "sh", "-c", "ip link set lo up && mount --bind /dev/null /etc/resolv.conf"],
            capture_output=True,
            check=False,
        ).returncode
    )


def may_join_two() -> bool:
    """Whether it may join two of them (ip link add type veth, nsenter)."""
    return (
        may_unshare()
        and not subprocess.run(
            [
                "unshare",
                "-rmn",
                "sh",
                "-c",
                "ip link add one type veth peer name other && command -v nsenter",
            ],
            capture_output=True,
            check=False,
        ).returncode
    )
