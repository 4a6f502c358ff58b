"""The wheel: everything comes out in the step it is due in, once, and never if it has left."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from moonstep.scheduler.wheel import Wheel, steps_to_fill


@dataclass(eq=False)
class Item:
    name: int
    due_step: int = 0


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(0, 3), st.integers(0, 4)),
        st.tuples(st.just("leave"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS)
def test_an_item_is_due_once_in_the_step_it_was_last_entered_under(
    actions: list[tuple[str, int, int]],
) -> None:
    wheel: Wheel[Item] = Wheel()
    items = [Item(name) for name in range(4)]
    wanted: dict[int, int] = {}
    step = 1
    for action, name, ahead in actions:
        if action == "enter":
            wheel.enter(items[name], step + ahead)
            wanted[name] = step + ahead
        elif action == "leave":
            wheel.leave(items[name])
            wanted.pop(name, None)
        else:
            due = [item.name for item in wheel.due(step)]
            assert sorted(due) == sorted(n for n, s in wanted.items() if s == step)
            assert all(items[n].due_step == 0 for n in due)
            wanted = {n: s for n, s in wanted.items() if s != step}
            step += 1


def test_what_is_due_in_one_step_comes_in_the_order_entered() -> None:
    wheel: Wheel[Item] = Wheel()
    items = [Item(name) for name in range(3)]
    for item in (items[2], items[0], items[1]):
        wheel.enter(item, 5)
    assert [item.name for item in wheel.due(5)] == [2, 0, 1]
    assert wheel.due(5) == []


@given(missing=st.integers(1, 64), tokens_per_decode=st.integers(1, 9))
def test_nobody_fills_a_block_before_the_wheel_looks(missing: int, tokens_per_decode: int) -> None:
    """However many tokens each step settles, the block is not full before the step looked at."""
    steps = steps_to_fill(missing, tokens_per_decode)
    assert steps >= 1
    assert (steps - 1) * tokens_per_decode < missing
