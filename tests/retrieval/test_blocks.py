import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from retrieval.blocks import BlockSizes, blocks

pairs = st.tuples(st.integers(0, 300), st.integers(0, 300)).map(lambda ends: (min(ends), max(ends)))
sizes = st.builds(BlockSizes, most=st.integers(1, 90), first=st.integers(1, 60), growth=st.integers(1, 5))


@given(st.lists(pairs, min_size=1, max_size=8), sizes, st.integers(0, 400))
def test_every_row_of_a_range_is_in_one_block_with_its_query_and_no_other_row_is_read(
    ranges: list[tuple[int, int]], size: BlockSizes, known_rows: int
) -> None:
    covered: dict[int, list[int]] = {query: [] for query in range(len(ranges))}
    read: list[int] = []
    for block in blocks(np.array(ranges), size, known_rows):
        assert 0 < block.stop - block.start <= size.most
        assert len(block.queries) == len(set(block.queries.tolist())) > 0
        read.extend(range(block.start, block.stop))
        for query in block.queries.tolist():
            covered[query].extend(range(block.start, block.stop))
    assert read == sorted(set(read))
    for query, (low, high) in enumerate(ranges):
        assert set(range(low, high)) <= set(covered[query])
        inside = [row for row in covered[query] if low <= row < high]
        assert inside == list(range(low, high))
    if read:
        assert min(read) == min(low for low, high in ranges if low < high)
        assert max(read) == max(high for low, high in ranges if low < high) - 1


def test_rows_between_two_ranges_are_not_read() -> None:
    made = list(blocks(np.array([[0, 5], [1_000_000, 1_000_010]]), BlockSizes(64)))
    assert [(b.start, b.stop) for b in made] == [(0, 5), (1_000_000, 1_000_010)]
    assert list(blocks(np.array([[4, 4]]), BlockSizes(64))) == []
