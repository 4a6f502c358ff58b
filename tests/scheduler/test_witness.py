"""The second witness: what is known of a block from its allocation and its life's end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moonstep.scheduler.columns import Columns, key_suffix
from moonstep.scheduler.witness import _FEWEST_ENDED, _FEWEST_NAMES, NOBODY, Witness


def names(life: int, count: int) -> list[bytes]:
    return [b"%d-%d" % (life, depth) for depth in range(count)]


def found(witness: Witness, blocks: Sequence[int], as_names: Sequence[bytes]) -> Columns:
    return witness.computed(0, blocks, [name + key_suffix(0) for name in as_names])


def test_a_block_is_known_by_its_life_s_name_at_its_depth() -> None:
    witness = Witness()
    source = witness.begin(7, 0, names(7, 3))
    witness.saw_allocated([10, 11, 12], source, range(3))
    witness.end(source, [12])
    columns = found(witness, [12, 11, 10], [b"7-2", b"7-1", b"7-0"])
    assert columns.blocks == [11, 10], "the third was never computed"
    assert (columns.lives, columns.depths) == ([7, 7], [1, 0])
    assert columns.names == [b"7-1", b"7-0"]


def test_a_block_that_was_named_anew_without_our_hearing_of_it_is_not_known() -> None:
    """A request that is preempted in the schedule() that gave it blocks is never told of."""
    witness = Witness()
    source = witness.begin(1, 0, names(1, 1))
    witness.saw_allocated([4], source, [0])
    witness.end(source, [])
    assert not found(witness, [4], [b"2-0"])
    assert found(witness, [4], [b"1-0"])


def test_a_name_that_comes_after_its_block_counts() -> None:
    witness = Witness()
    growing = names(1, 1)
    source = witness.begin(1, 0, growing)
    witness.saw_allocated([4, 5], source, [0, 1])
    assert not found(witness, [5], [b"1-1"])
    growing.append(b"1-1")
    assert found(witness, [5], [b"1-1"])


def test_of_a_block_of_several_units_the_last_one_names_it() -> None:
    witness = Witness()
    source = witness.begin(1, 0, [b"a", b"b", b"c", b"d"], units=2)
    witness.saw_allocated([8, 9], source, [0, 1])
    assert found(witness, [8, 9], [b"b", b"d"]).blocks == [8, 9]
    assert not found(witness, [8], [b"a"])


def test_groups_with_the_same_names_are_kept_apart() -> None:
    witness = Witness()
    source = witness.begin(1, 1, [b"a"])
    witness.saw_allocated([3], source, [0])
    assert not found(witness, [3], [b"a"])


def test_what_is_handed_out_again_is_its_new_life_s() -> None:
    witness = Witness()
    first, second = (witness.begin(life, 0, names(life, 2)) for life in (1, 2))
    witness.saw_allocated([4, 5], first, [0, 1])
    witness.saw_allocated([5], [second], [0])
    witness.end(first, [4, 5])
    assert not found(witness, [4], [b"1-0"])
    assert found(witness, [5], [b"2-0"]), "an old life's end is no concern of a block it has lost"


def test_restored_blocks_of_several_lives_are_known() -> None:
    witness = Witness()
    columns = Columns(0, [1, 2, 1], [5, 0, 9], [b"x", b"y", b"z"], [20, 21, 22])
    witness.saw_computed(columns)
    assert found(witness, [20, 21, 22], [b"x", b"y", b"z"]) == columns


def test_a_reset_forgets_everything() -> None:
    witness = Witness()
    source = witness.begin(1, 0, names(1, 1))
    witness.saw_allocated([4], source, [0])
    witness.forget()
    assert not found(witness, [4], [b"1-0"])


@pytest.mark.parametrize("blocks_each", [0, 1])
def test_lives_of_which_nothing_is_left_leave_nothing_behind(blocks_each: int) -> None:
    witness = Witness()
    for life in range(1, 10 * _FEWEST_ENDED):
        source = witness.begin(life, 0, names(life, 1))
        witness.saw_allocated([3] * blocks_each, source, range(blocks_each))
        witness.end(source, [])
    assert len(witness._sources) <= 2 * _FEWEST_ENDED + 1, "numbers are used again"
    kept = [s for s in witness._sources if s is not witness._sources[NOBODY]]
    assert len(kept) <= _FEWEST_ENDED + 1, "names of ended lives are let go"


def names_kept(witness: Witness) -> int:
    """How many names the sources of ended lives keep."""
    return sum(len(witness._sources[source].names) for source in witness._ended)


def test_an_ended_life_keeps_its_own_names_and_not_those_of_its_prefix() -> None:
    """Lives that follow one on another, each on a prefix that the engine has, and one block more.

    The pool has 3,000 blocks; all contexts together have three million.
    """
    prefix, pool_blocks = names(0, 3000), 3000
    witness = Witness()
    for life in range(1, 1001):
        hashes = [*prefix, b"own-%d" % life]
        source = witness.begin(life, 0, hashes, first=len(prefix))
        block = life % pool_blocks
        witness.saw_allocated([block], source, [len(prefix)])
        witness.end(source, [], len(hashes))
        assert found(witness, [block], [b"own-%d" % life]).depths == [len(prefix)]
        assert names_kept(witness) <= pool_blocks
    assert found(witness, [1], [b"own-1"]), "what has not left is still known"


@pytest.mark.parametrize("units", [1, 2])
def test_own_names_are_found_where_they_stand_once_the_life_has_ended(units: int) -> None:
    hashes = names(1, 10 * units)
    witness = Witness()
    source = witness.begin(1, 0, hashes, units, first=4)
    witness.saw_allocated(range(20, 26), source, range(4, 10))
    witness.end(source, [24, 25], 8)
    named = [hashes[(depth + 1) * units - 1] for depth in range(4, 10)]
    assert found(witness, range(20, 26), named).depths == [4, 5, 6, 7]
    assert len(witness._sources[source].names) == 4


def test_a_head_that_stays_keeps_no_name_of_the_tail_that_left() -> None:
    """Prompts of 2,000 blocks through a pool of 4,000: of each only the first block stays."""
    pool_blocks, blocks_each = 4000, 2000
    witness = Witness()
    tail = range(1000, 1000 + blocks_each - 1)
    for life in range(1, 401):
        source = witness.begin(life, 0, names(life, blocks_each))
        witness.saw_allocated([life, *tail], source, range(blocks_each))
        witness.end(source, [], blocks_each)
        assert names_kept(witness) <= 3 * pool_blocks + 2 * _FEWEST_NAMES
    witness._sweep()
    assert names_kept(witness) <= 2 * pool_blocks
    for life in (1, 200, 400):
        assert found(witness, [life], [b"%d-0" % life]).lives == [life]
    last = found(witness, tail, names(400, blocks_each)[1:])
    assert last.depths == list(range(1, blocks_each))
