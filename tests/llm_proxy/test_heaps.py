"""The heap from which anything may be taken, against a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from llm_proxy.heaps import Heap

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "discard"]), st.integers(0, 9), st.integers(0, 3)), max_size=300
)


@given(OPERATIONS)
def test_the_first_is_always_the_least_that_came_first(operations: list[tuple[str, int, int]]) -> None:
    heap: Heap[float, int] = Heap()
    known: dict[int, tuple[int, int]] = {}
    for number, (what, item, key) in enumerate(operations):
        if what == "put":
            heap.put(item, key)
            known[item] = key, number
        else:
            heap.discard(item)
            known.pop(item, None)

        least = min(known, key=known.__getitem__, default=None)
        assert heap.first == least
        assert heap.first_key == (None if least is None else known[least][0])
        assert len(heap) == len(known)


def test_what_was_taken_out_does_not_pile_up() -> None:
    heap: Heap[float, int] = Heap()
    for number in range(10_000):
        heap.put(number, number)
        heap.discard(number)

    assert len(heap._entries) < 200  # pyright: ignore[reportPrivateUsage]
