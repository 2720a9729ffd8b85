import random

import hypothesis
import pytest
from hypothesis import strategies as st

from env_manager.environments.sokoban import KINDS, Sokoban
from env_manager.environments.sokoban_search import MOVES, Room, State, make_puzzle, search


def sokoban(*rows: str, turns: int = 10, **settings) -> Sokoban:
    """A room drawn in XSB's signs."""
    boxes = max(1, sum(row.count("$") + row.count("*") for row in rows))
    environment = Sokoban(turns=turns, symbols="xsb", boxes=boxes, **settings)
    environment.reset(0, 0)
    cells = {(y, x): sign for y, row in enumerate(rows) for x, sign in enumerate(row)}
    room = Room(
        frozenset(cell for cell, sign in cells.items() if sign != "#"),
        frozenset(cell for cell, sign in cells.items() if sign in ".+*"),
    )
    player = next(cell for cell, sign in cells.items() if sign in "@+")
    state = State(player, frozenset(cell for cell, sign in cells.items() if sign in "$*"))
    object.__setattr__(environment._puzzle, "room", room)
    environment._state, environment._plan, environment._size = state, [], len(rows)
    return environment


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    seed=st.integers(0, 2**63),
    size=st.integers(6, 10),
    boxes=st.integers(1, 3),
    walls=st.floats(0, 0.4),
)
def test_every_puzzle_is_solved_by_the_way_it_was_made_within_its_turns(seed: int, size: int, boxes: int, walls: float):
    turns = 4 * size * boxes
    puzzle = make_puzzle(random.Random(seed), size=size, boxes=boxes, walls=walls, moves=turns)

    state = puzzle.start
    for word in puzzle.solution:
        following = puzzle.room.after(state, word)
        assert following is not None
        state = following

    assert puzzle.room.is_solved(state)
    assert 0 < len(puzzle.solution) <= turns
    assert not puzzle.start.boxes & puzzle.room.targets
    assert len(puzzle.room.targets) == len(puzzle.start.boxes) == boxes


def test_the_search_finds_a_shortest_solution():
    room = Room(frozenset((1, x) for x in range(1, 7)) | {(2, 1), (2, 2)}, frozenset({(1, 6)}))

    # Up to the left of the box, then three pushes.
    assert search(room, State((2, 2), frozenset({(1, 3)})), most_states=1000) == ["up", "right", "right", "right"]


@pytest.mark.parametrize("corner", [(1, 1), (1, 6)])
def test_the_search_knows_that_a_box_in_a_corner_is_lost(corner: tuple[int, int]):
    floor = frozenset((y, x) for y in range(1, 7) for x in range(1, 7))

    assert search(Room(floor, frozenset({(3, 3)})), State((4, 4), frozenset({corner})), most_states=10**6) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("#@$--#", "# - @ $ - #"),
        ("#@$.-#", "# - @ * - #"),
        ("#@*--#", "# - + $ - #"),
        ("#@$$-#", "# @ $ $ - #"),
        ("#@$#-#", "# @ $ # - #"),
        ("#-@#-#", "# - @ # - #"),
    ],
)
def test_a_box_is_pushed_and_never_into_a_wall_or_another_box(before: str, after: str):
    environment = sokoban("######", before, "#----#", "#-.--#", "#----#", "######")

    assert environment.step("right").text.splitlines()[1] == after


def test_a_box_brought_home_pays_its_share_and_costs_it_again():
    environment = sokoban("######", "#@$.-#", "#----#", "#$--.#", "#----#", "######")

    there = environment.step("right")
    gone = environment.step("right")

    assert (there.reward, there.metrics["progress"]) == (0.25, 0.5)
    assert (gone.reward, gone.metrics["progress"]) == (-0.25, 0.0)


def test_solving_pays_all_but_the_share_of_turns_that_it_took():
    shaped = sokoban("######", "#@$.-#", "######", turns=10).step("right")
    plain = sokoban("######", "#@$.-#", "######", turns=10, shaped=False).step("right")

    # Half for the box, 0.4 for solving, 0.1 for nine of ten turns.
    assert shaped.reward == pytest.approx(0.5 + 0.4 + 0.1 * 0.9)
    assert (plain.reward, plain.done, plain.truncated, plain.metrics["success"]) == (1.0, True, False, 1.0)


def test_thoughts_before_the_last_line_are_no_move():
    environment = sokoban("######", "#@--.#", "#-$--#", "#----#", "#----#", "######")

    step = environment.step("I could go down.\n\n  Right \n")

    assert step.text.splitlines()[1] == "# - @ - . #"


@pytest.mark.parametrize(
    ("symbols", "shown"),
    [("letters", "# _ O X √ P S"), ("xsb", "# - . $ * @ +"), ("words", "wall floor target box done player home")],
)
def test_symbols_are_explained_and_shown(symbols, shown: str):
    observation = Sokoban(symbols=symbols).reset(1, 0)

    for symbol, kind in zip(shown.split(), KINDS, strict=True):
        assert f"{symbol} is {kind}" in observation.system
    assert set(observation.text.split()) <= set(shown.split())
    assert len(observation.text.splitlines()) == 6


def test_a_hash_is_equal_exactly_where_the_room_looks_equal():
    by_hash: dict[str, str] = {}
    for seed in (1, 1, 2):
        environment, chance = Sokoban(), random.Random(seed)
        environment.reset(seed, 0)
        for _ in range(15):
            step = environment.step(chance.choice(list(MOVES)))
            if not step.done:
                assert by_hash.setdefault(step.state_hash, step.text) == step.text

    assert len(by_hash) == len(set(by_hash.values())) > 10


async def test_after_mistakes_the_solver_starts_from_where_it_is():
    environment = Sokoban(size=8, turns=200)
    environment.reset(4, 0)
    chance = random.Random(0)
    for _ in range(3):
        environment.step(chance.choice(list(MOVES)))

    moves = 0
    while not environment.step(environment.solve()).done:
        moves += 1

    assert moves < 100


def test_turns_that_no_puzzle_fits_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"3 boxes .* 2 turns solve; allow more"):
        Sokoban(boxes=3, turns=2).reset(0, 0)
