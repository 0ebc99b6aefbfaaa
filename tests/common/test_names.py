"""Names that nobody else has."""

import os
import re

from sglang_fair.common.names import fresh_name


def test_names_are_new_each_time() -> None:
    names = [fresh_name() for _ in range(3000)]
    assert len(set(names)) == 3000
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


def test_a_forked_process_makes_its_own() -> None:
    fresh_name()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.write(writes, "".join(fresh_name() for _ in range(300)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    its = os.read(reads, 300 * 32).decode()
    os.close(reads), os.close(writes)
    mine = {fresh_name() for _ in range(300)}
    assert not mine & {its[at : at + 32] for at in range(0, len(its), 32)}
