"""The heap against a sorted list, and its memory."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_fair.core.heap import SLACK, LazyHeap
from tests.support.budget import examples

ITEMS = st.sampled_from("abcdefgh")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), ITEMS, st.integers(-3, 3)),
        st.tuples(st.just("discard"), ITEMS, st.just(0)),
        st.tuples(st.just("first"), ITEMS, st.just(0)),
        st.tuples(st.just("pop"), ITEMS, st.just(0)),
    ),
    max_size=200,
)


@settings(max_examples=examples(100))
@given(steps=STEPS)
@example(steps=[("put", "a", 0), ("put", "b", 1), ("put", "a", 2), ("first", "a", 0)])
def test_heap_is_a_sorted_list(steps):
    """Keys are total, as the contract asks: the number and then the item itself."""
    heap: LazyHeap[str] = LazyHeap()
    expected: dict[str, tuple[int, str]] = {}
    for kind, item, number in steps:
        if kind == "put":
            heap.put(item, (number, item))
            expected[item] = (number, item)
        elif kind == "discard":
            heap.discard(item)
            expected.pop(item, None)
        smallest = min(expected, key=lambda item: expected[item], default=None)
        if kind != "put":
            assert heap.first() == smallest
        if kind == "pop" and smallest is not None:
            heap.discard(smallest)
            del expected[smallest]
        assert len(heap) == len(expected)
        assert set(heap) == set(expected)
        assert all(heap.key(item) == key for item, key in expected.items())
        assert all((item in heap) == (item in expected) for item in "abcdefgh")


@settings(max_examples=examples(20))
@given(moves=st.integers(1000, 4000), live=st.integers(1, 50))
def test_moves_and_removals_do_not_fill_memory(moves, live):
    heap: LazyHeap[int] = LazyHeap()
    for move in range(moves):
        heap.put(move % live, (move * 7919 % 1009, move))
        assert len(heap._entries) <= 2 * len(heap) + SLACK
    for item in range(live, moves):
        heap.put(item, (2000, item))
    for item in range(1, moves):
        heap.discard(item)
        assert len(heap._entries) <= 2 * len(heap) + SLACK
