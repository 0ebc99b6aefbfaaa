"""What travels with a request: the weight in a header, the cache group in a salt; and what somebody made up."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_fair.common.caller import GROUP_MARK, HEADER_WEIGHT, Caller, read_weight, salted
from sglang_fair.common.weights import MOST_WEIGHT
from tests.support.budget import examples

CALLER = settings(max_examples=examples(300))


@CALLER
@given(weight=st.floats(1 / MOST_WEIGHT, MOST_WEIGHT), version=st.integers(0, 2**63))
def test_a_weight_goes_there_and_back(weight, version):
    headers = Caller("a", weight, "g", version).headers()
    assert list(headers) == [HEADER_WEIGHT]
    assert read_weight(headers[HEADER_WEIGHT]) == (weight, version)
    assert Caller("a", group="g").headers() == {}


@CALLER
@given(text=st.text(alphabet="0123456789.@e-+naif_ ²", max_size=70))
@example("")
@example("3")
@example("3@")
@example("@3")
@example("nan@3")
@example("inf@3")
@example("-1@3")
@example("0@3")
@example("1e9@3")
@example("3@-3")
@example("3@²")
@example("3@" + "9" * 21)
@example("3.0@1@2")
def test_no_header_makes_a_weight_that_nobody_can_have(text):
    found = read_weight(text)
    if found is not None:
        weight, version = found
        assert 1 / MOST_WEIGHT <= weight <= MOST_WEIGHT
        assert version >= 0


NAMES = st.none() | st.text(alphabet="gh ", min_size=1, max_size=3)
SALTS = st.none() | st.text(alphabet=f"gh {GROUP_MARK}", min_size=1, max_size=8)


@CALLER
@given(one=st.tuples(NAMES, SALTS), other=st.tuples(NAMES, SALTS))
@example((None, f"{GROUP_MARK}g{GROUP_MARK}"), ("g", None))
@example((None, f"{GROUP_MARK}g{GROUP_MARK}s"), ("g", "s"))
@example(("g", f"{GROUP_MARK}h"), (None, f"{GROUP_MARK}g{GROUP_MARK}{GROUP_MARK}h"))
def test_no_salt_reaches_into_a_group_or_out_of_it(one, other):
    """Without groups a salt is what its sender says."""
    assert (salted(*one) == salted(*other)) == (one == other)
    plain = (one[1] or "").replace(GROUP_MARK, "")
    assert salted(None, plain) == (plain or None)
