"""GEM's, TextArena's and reasoning-gym's worlds."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from env_manager.adapters.adapter import Adapter
from env_manager.adapters.gem import Gem
from env_manager.adapters.reasoning_gym import ReasoningGym
from env_manager.adapters.textarena import TextArena
from rollfarm.env import Observation
from rollfarm.errors import InvalidArgument, PackageMissing
from tests.env_manager.adapted import GARBAGE, Played, play

Make = Callable[[], Adapter]


def halving(high: int, written: str) -> Callable[[str], str]:
    """Finds a number by what the game says of the guess before."""
    low, top, guess = 1, high, 0

    def act(shown: str) -> str:
        nonlocal low, top, guess
        if guess and "lower" in shown:
            top = guess - 1
        elif guess and "higher" in shown:
            low = guess + 1
        guess = (low + top) // 2
        return written % guess

    return act


def test_gem_s_number_is_found_by_halving_for_its_reward_of_one():
    rewards = [
        play(Gem(id="game:GuessTheNumber-v0-easy"), halving(10, r"\boxed{%d}"), seed=seed).reward for seed in range(10)
    ]

    assert rewards == [1.0] * 10


def test_textarena_s_number_is_found_by_halving_for_its_reward_of_one():
    games = [play(TextArena(id="GuessTheNumber-v0"), halving(20, "[%d]"), seed=seed) for seed in range(10)]

    assert [game.reward for game in games] == [1.0] * 10
    assert {game.last.metrics["success"] for game in games} == {1.0}


def winning(shown: str) -> str:
    """The free square that wins, or that keeps the other from winning, or the first."""
    board = re.findall(r"^ ([XO\d]) \| ([XO\d]) \| ([XO\d]) ?$", shown, re.MULTILINE)[-3:]
    cells = [cell for row in board for cell in row]
    mine = "O" if cells.count("O") <= cells.count("X") else "X"
    lines = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
    for who in (mine, "XO".replace(mine, "")):
        for line in lines:
            held = [cells[cell] for cell in line]
            free = [cell for cell in line if cells[cell].isdigit()]
            if held.count(who) == 2 and free:
                return f"[{free[0]}]"
    return f"[{next(cell for cell in (4, 0, 2, 6, 8, 1, 3, 5, 7) if cells[cell].isdigit())}]"


@pytest.mark.parametrize("seat", [0, 1])
def test_two_play_and_who_looks_ahead_beats_a_random_opponent_mostly(seat: int):
    rewards = [
        play(TextArena(id="TicTacToe-v0", players=2, seat=seat), winning, seed=seed).reward for seed in range(10)
    ]

    assert -1.0 not in rewards
    assert rewards.count(1.0) >= 6


def always_first(shown: str, chance: random.Random) -> str:
    """An opponent for tests: takes the first of the moves that are left."""
    return re.findall(r"'(\[\d\])'", shown.splitlines()[-1])[0]


def test_an_opponent_of_one_s_own_plays_the_other_seat():
    game = TextArena(
        id="TicTacToe-v0", players=2, opponent="tests.env_manager.test_adapters_games:always_first", seat=0
    )

    played = play(game, plan("[4]", "[2]", "[6]"))

    assert "[Player 1] [0]" in played.shown[1]
    assert "[Player 1] [1]" in played.shown[2]
    assert played.reward == 1.0


def plan(*actions: str) -> Callable[[str], str]:
    left = iter(actions)
    return lambda shown: next(left)


def test_each_turn_shows_what_is_new_and_not_the_game_again():
    played = play(TextArena(id="TicTacToe-v0", players=2), winning)

    assert [text.count("Your goal is to win") for text in played.shown] == [1] + [0] * (len(played.shown) - 1)
    assert not any(re.search(r"^\[Player 0\]", text, re.MULTILINE) for text in played.shown)


EQUAL: list[tuple[str, Make]] = [
    ("gem", lambda: Gem(id="game:Mastermind-v0-random")),
    ("gem, reasoning-gym", lambda: Gem(id="rg:leg_counting")),
    ("textarena", lambda: TextArena(id="TowerOfHanoi-v0")),
    ("textarena, cards", lambda: TextArena(id="KuhnPoker-v0", players=2)),
    ("textarena, moves", lambda: TextArena(id="TicTacToe-v0", players=2, seat=1)),
    ("reasoning_gym", lambda: ReasoningGym(dataset="word_sorting")),
]


@pytest.mark.parametrize("make", [make for _, make in EQUAL], ids=[name for name, _ in EQUAL])
def test_equal_seeds_give_equal_episodes_though_others_play_between_the_turns(make: Make):
    def once(disturb: bool) -> Played:
        chance = random.Random(0)

        def act(shown: str) -> str:
            if disturb:
                random.seed(chance.random())
                play(make(), lambda text: "[0]", seed=99, turns=2)
            return f"[{len(shown) % 7}]"

        return play(make(), act, seed=5, turns=6)

    alone, disturbed = once(False), once(True)

    assert (alone.shown, alone.reward) == (disturbed.shown, disturbed.reward)


def test_what_an_episode_draws_is_not_taken_from_the_process_s_own_numbers():
    random.seed(1)
    before = random.getstate()

    play(TextArena(id="GuessTheNumber-v0"), lambda shown: "[1]")

    assert random.getstate() == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gem(id="game:GuessTheNumber-v0-hard"),
        lambda: Gem(id="game:Sokoban-v0-easy"),
        lambda: Gem(id="rg:leg_counting"),
        lambda: TextArena(id="GuessTheNumber-v0"),
        lambda: TextArena(id="TicTacToe-v0", players=2, seat=1),
        lambda: TextArena(id="KuhnPoker-v0", players=2),
        lambda: ReasoningGym(dataset="countdown"),
    ],
)
def test_garbage_never_breaks_a_game(make: Make):
    chance = random.Random(2)

    for seed in range(5):
        assert play(make(), lambda shown: chance.choice(GARBAGE), seed=seed).last.done


def test_an_answer_is_scored_by_its_data_set_wherever_it_stands():
    question = ReasoningGym(dataset="chain_sum", options={"min_terms": 2, "max_terms": 2}, system="Think.")
    asked = question.reset(3, 0)

    assert isinstance(asked, Observation)
    assert asked.system == "Think."
    assert question.step(f"It is <answer> {asked.reference} </answer>").reward == 1.0
    assert question.step(asked.reference).reward == 1.0
    assert question.step(f"{asked.reference} or so").reward < 1.0
    assert question.step("<answer></answer>").metrics == {"success": 0.0}


def test_a_sized_data_set_asks_its_questions_by_index_whatever_the_seed():
    def asked(seed: int, index: int, **settings: Any) -> str:
        observation = ReasoningGym(dataset="chain_sum", **settings).reset(seed, index)
        assert isinstance(observation, Observation)
        return observation.text

    assert asked(1, 2, size=3) == asked(9, 5, size=3)
    assert asked(1, 2, size=3) != asked(1, 1, size=3)
    assert asked(1, 2, size=3) != asked(1, 2, size=3, size_seed=1)
    assert asked(1, 2) != asked(9, 2)


@pytest.mark.parametrize(
    ("world", "data"),
    [
        (lambda: Gem(id="game:Wordle-v0-easy"), "nltk's 'words'"),
        (lambda: TextArena(id="Wordle-v0"), "nltk's 'words'"),
        (lambda: TextArena(id="Hangman-v0"), "nltk's 'words'"),
        (lambda: Gem(id="math:GSM8K"), "pip install datasets"),
    ],
)
def test_missing_data_is_named_with_how_to_get_it(world: Make, data: str, monkeypatch: pytest.MonkeyPatch):
    import nltk

    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)  # it would ask the network first
    monkeypatch.setattr(nltk.data, "path", [])

    with pytest.raises(PackageMissing, match=data) as missing:
        world().reset(0, 0)

    assert "not on this machine" in str(missing.value)


@pytest.mark.parametrize(
    ("world", "problem"),
    [
        (lambda: Gem(id="game:Chess-v0"), "Environment game:Chess-v0 not found"),
        (lambda: TextArena(id="Chess-v7"), "Environment Chess-v7 not found"),
        (lambda: TextArena(id="TicTacToe-v0"), "number of players has to be 2, received 1"),
        (lambda: TextArena(id="TicTacToe-v0", players=2, seat=2), "seat 2 is none of 2 players"),
        (lambda: TextArena(id="TicTacToe-v0", players=2, opponent="nobody"), "Unknown opponent 'nobody'"),
        (lambda: ReasoningGym(dataset="sums"), "Dataset 'sums' not registered"),
        (lambda: ReasoningGym(dataset="chain_sum", options={"depth": 1}), "unexpected keyword argument 'depth'"),
    ],
)
def test_what_a_package_does_not_take_is_the_caller_s_mistake(world: Make, problem: str):
    with pytest.raises(InvalidArgument, match=problem):
        world().reset(0, 0)


@pytest.mark.parametrize(
    ("make", "marked"),
    [
        (lambda: Gem(id="rg:countdown"), "\\boxed{%s}"),
        (lambda: ReasoningGym(dataset="countdown"), "<answer>%s</answer>"),
    ],
    ids=["gem", "reasoning_gym"],
)
def test_an_answer_is_not_run_as_a_program(make: Make, marked: str, tmp_path: Path):
    proof = tmp_path / "proof"

    played = play(make(), lambda _: marked % f"__import__('os').system('touch {proof}')")

    assert played.reward == 0.0
    assert not proof.exists()
