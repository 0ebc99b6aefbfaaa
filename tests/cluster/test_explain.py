"""What a request is said to have waited for, and why it went where it went, in words."""

from sglang_fair.cluster.explain import CAUSES, WHY
from sglang_fair.core.waits import CAUSES as KNOWN_CAUSES
from sglang_fair.metrics.table import REASONS


def test_each_cause_and_each_reason_has_its_words() -> None:
    assert set(CAUSES) == set(KNOWN_CAUSES)
    assert set(WHY) == {*REASONS, "told"}, "told is the router's own, of requests that came before it did"
