import json
import random
from collections.abc import Callable

import pytest

from env_manager.demonstrations import main as write_demonstrations
from env_manager.environments import ENVIRONMENTS
from env_manager.environments.frozen_lake import MOVES, FrozenLake
from env_manager.environments.guess_number import GuessNumber
from env_manager.environments.solvable import Solvable

CASES = [
    ("arithmetic", {}),
    ("arithmetic", {"digits": 3, "operations": ["times"]}),
    ("frozen_lake", {}),
    ("frozen_lake", {"size": 3, "view": "compact"}),
    ("frozen_lake", {"size": 6, "holes": 0.4, "view": "map"}),
    ("guess_number", {}),
    ("guess_number", {"high": 100}),
]


def play(environment: Solvable, seed: int, act: Callable[[Solvable], str]) -> tuple[float, float, list[str]]:
    """Reward, success and what was shown."""
    shown = [environment.reset(seed, 0).text]
    reward = 0.0
    while True:
        step = environment.step(act(environment))
        reward += step.reward
        if step.done:
            return reward, step.metrics["success"], shown
        shown.append(step.text)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_solver_succeeds_every_time_and_chance_rarely_does(name: str, settings: dict[str, object]):
    kind = ENVIRONMENTS[name]
    chance = random.Random(0)
    solved = [play(kind(**settings), seed, lambda environment: environment.solve()) for seed in range(100)]
    guessed = [play(kind(**settings), seed, lambda _: chance.choice(kind.ACTIONS)) for seed in range(100)]

    assert mean([success for _, success, _ in solved]) == 1.0
    assert mean([success for _, success, _ in guessed]) < 0.45
    assert mean([reward for reward, _, _ in solved]) > mean([reward for reward, _, _ in guessed]) + 0.4


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("arithmetic", {}),
        ("arithmetic", {"operations": ["minus"]}),
        ("arithmetic", {"operations": ["plus"]}),
        ("frozen_lake", {}),
        ("frozen_lake", {"size": 3, "view": "compact"}),
        ("frozen_lake", {"size": 3, "view": "map", "holes": 0.0}),
        ("guess_number", {}),
        ("guess_number", {"high": 7}),
    ],
)
def test_an_environment_s_words_are_what_it_shows_and_takes_and_no_others(name: str, settings: dict[str, object]):
    kind = ENVIRONMENTS[name]
    chance = random.Random(0)
    seen = set(FrozenLake.ACTIONS) if name == "frozen_lake" else set()

    def act(environment: Solvable) -> str:
        seen.add(solution := environment.solve())
        return chance.choice([solution, *kind.ACTIONS, "nonsense"])

    for seed in range(2000):
        for text in play(kind(**settings), seed, act)[2]:
            seen.update(text.split())

    assert seen == set(kind(**settings).words())


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_equal_seed_gives_an_equal_episode_and_another_seed_another(name: str):
    kind = ENVIRONMENTS[name]
    episodes = [play(kind(), seed, lambda environment: environment.solve()) for seed in (1, 1, *range(2, 12))]

    assert episodes[0] == episodes[1]
    assert any(episode != episodes[0] for episode in episodes[2:])


def lake(holes: str = "", size: int = 3, turns: int = 6) -> FrozenLake:
    """A lake without chance: `holes` are cells like "0,1 1,1"."""
    environment = FrozenLake(size=size, holes=0.0, turns=turns)
    environment.reset(0, 0)
    cells = frozenset((int(cell[0]), int(cell[2])) for cell in holes.split())
    environment._hole_cells, environment._distance = cells, environment._distances(cells)
    return environment


def test_the_lake_shows_where_one_stands_and_what_lies_beside():
    environment = lake("0,1")

    step = environment.step("down")

    assert environment._look() == step.text == "at 1 0 left wall down ice right ice up ice"


def test_the_compact_view_leaves_out_the_words_that_never_change():
    assert FrozenLake(size=2, holes=0.0, view="compact").reset(0, 0).text == "0 0 wall ice ice wall"


def test_a_step_forward_earns_its_share_of_the_way_and_a_step_back_returns_it():
    environment = lake()

    forward, back = environment.step("down"), environment.step("up")

    # The way is 4 steps long, and a valid action out of 6 turns pays 0.1 / 6.
    assert forward.reward == pytest.approx(0.5 / 4 + 0.1 / 6)
    assert back.reward == pytest.approx(-0.5 / 4 + 0.1 / 6)


def test_the_shortest_way_earns_nearly_one_and_speed_is_part_of_it():
    environment = lake()
    rewards = [environment.step(word).reward for word in ("down", "down", "right", "right")]

    # Progress 0.5, goal 0.3, format 4 * 0.1 / 6, speed 2 * 0.2 / 6.
    assert sum(rewards) == pytest.approx(0.5 + 0.3 + 0.4 / 6 + 0.4 / 6)


def test_a_fall_gives_up_the_progress_and_ends_the_episode():
    environment = lake("1,1")
    environment.step("down")

    fall = environment.step("right")

    assert fall.reward == pytest.approx(-0.5 / 4 + 0.1 / 6)
    assert (fall.done, fall.truncated, fall.metrics["success"]) == (True, False, 0.0)


@pytest.mark.parametrize("word", ["", "sideways", "left left", "7"])
def test_a_word_that_is_no_move_earns_nothing_and_moves_nobody(word: str):
    step = lake().step(word)

    assert (step.reward, step.text) == (0.0, "at 0 0 left wall down ice right ice up wall")


def test_the_last_turn_cuts_the_episode_short():
    environment = lake(turns=2)
    environment.step("left")

    last = environment.step("left")

    assert (last.done, last.truncated, last.metrics) == (True, True, {"success": 0.0, "progress": 0.0})


def test_slippery_ice_leads_astray_two_times_in_three_and_never_back():
    seen = {"forward": 0, "astray": 0}
    for seed in range(300):
        environment = FrozenLake(size=5, holes=0.0, slippery=True)
        environment.reset(seed, 0)
        environment._at = (2, 2)
        environment.step("right")
        seen["forward" if environment._at == (2, 3) else "astray"] += 1
        assert environment._at != (2, 1)

    assert 70 < seen["forward"] < 130


def test_states_are_told_apart_by_map_and_place():
    hashes = [FrozenLake().reset(seed, 0).state_hash for seed in (1, 1, 2)]

    assert hashes[0] == hashes[1] != hashes[2]
    assert set(MOVES) == set(FrozenLake.ACTIONS)


def test_guessing_not_a_number_costs_a_tenth_and_halving_always_suffices():
    environment = GuessNumber(high=20)
    environment.reset(3, 0)

    step = environment.step("seven")

    assert (step.text, step.reward) == ("number please", -0.1)


def test_demonstrations_are_chats_that_the_expert_wins(tmp_path):
    out = tmp_path / "chats.jsonl"

    write_demonstrations(["--environment", "arithmetic", "--count", "20", "--out", str(out)])

    chats = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert len(chats) == 20
    assert [message["role"] for message in chats[0]] == ["user", "assistant"]
    question = chats[0][0]["content"].split()
    operation = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}[question[3]]
    assert chats[0][1]["content"] == str(operation(int(question[2]), int(question[4])))


def test_noise_in_demonstrations_makes_that_share_of_answers_random(tmp_path):
    clean, noisy = tmp_path / "clean.jsonl", tmp_path / "noisy.jsonl"
    common = ["--environment", "arithmetic", "--count", "400"]

    write_demonstrations([*common, "--out", str(clean)])
    write_demonstrations([*common, "--out", str(noisy), "--noise", "0.2"])

    differ = [a != b for a, b in zip(clean.read_text().splitlines(), noisy.read_text().splitlines(), strict=True)]
    assert 0.13 < sum(differ) / len(differ) < 0.27
