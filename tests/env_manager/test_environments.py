import json
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from env_manager.demonstrations import main as write_demonstrations
from env_manager.environments import ENVIRONMENTS
from env_manager.environments.__main__ import print_scores
from env_manager.environments.frozen_lake import MOVES, FrozenLake
from env_manager.environments.guess_number import GuessNumber
from env_manager.environments.solvable import Instant, Solvable
from env_manager.playthrough import Playthrough, play
from rollfarm.config import ConfigError
from rollfarm.env import Action, ToolCall
from rollfarm.playing import Play
from rollfarm.registry import check_settings

CASES = [
    ("arithmetic", {}),
    ("arithmetic", {"digits": 3, "operations": ["times"]}),
    ("countdown", {}),
    ("countdown", {"count": 6, "high": 100, "target": 1000}),
    ("frozen_lake", {}),
    ("frozen_lake", {"size": 3, "view": "compact"}),
    ("frozen_lake", {"size": 6, "holes": 0.4, "view": "map"}),
    ("guess_number", {}),
    ("guess_number", {"high": 100}),
    ("household", {}),
    ("household", {"admissible": True, "shaped": True}),
    ("shop", {}),
    ("sokoban", {}),
    ("sokoban", {"size": 8, "boxes": 2, "symbols": "words"}),
    ("word_game", {}),
    ("word_game", {"length": 4}),
]

INSTANT = sorted(name for name, kind in ENVIRONMENTS.items() if issubclass(kind, Instant))


def solve(environment: Solvable) -> str:
    return environment.solve()


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


async def episodes(name: str, settings: dict[str, object], act, seeds: range = range(30)) -> list[Playthrough]:
    return [await play(ENVIRONMENTS[name](**settings), seed, act) for seed in seeds]


@pytest.mark.parametrize(("name", "settings"), CASES)
async def test_the_solver_succeeds_every_time_and_chance_rarely_does(name: str, settings: dict[str, object]):
    chance = random.Random(0)
    solved = await episodes(name, settings, solve)
    guessed = await episodes(name, settings, lambda environment: chance.choice(environment.actions()))

    assert [episode.success for episode in solved] == [1.0] * 30
    assert mean([episode.success for episode in guessed]) < 0.45
    assert mean([episode.reward for episode in solved]) > mean([episode.reward for episode in guessed]) + 0.4
    assert all(episode.reward <= 1 + 1e-9 for episode in solved + guessed)


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
async def test_an_environment_s_words_are_what_it_shows_and_takes_and_no_others(name: str, settings: dict[str, object]):
    chance = random.Random(0)
    seen = {*MOVES} if name == "frozen_lake" else set[str]()

    def act(environment: Solvable) -> str:
        seen.add(solution := environment.solve())
        return chance.choice([solution, *environment.actions(), "nonsense"])

    for episode in await episodes(name, settings, act, range(2000)):
        seen.update(" ".join(episode.texts).split())

    environment = ENVIRONMENTS[name](**settings)
    assert isinstance(environment, Instant)
    assert seen == set(environment.words())


@pytest.mark.parametrize(
    ("name", "settings"), [*CASES[2:], ("sokoban", {"symbols": "xsb", "rules": False}), ("shop", {"items": 30})]
)
async def test_every_word_that_is_shown_or_taken_is_among_an_environment_s_words(
    name: str, settings: dict[str, object]
):
    chance = random.Random(0)

    def act(environment: Solvable) -> str:
        return chance.choice([environment.solve(), chance.choice(environment.actions())])

    played = await episodes(name, settings, act, range(25))

    seen = [text for episode in played for text in (*episode.texts, *(action for action, _ in episode.turns))]
    environment = ENVIRONMENTS[name](**settings)
    assert isinstance(environment, Instant)
    assert set(" ".join(seen).split()) - set(environment.words()) == set()


@pytest.mark.parametrize("name", INSTANT)
async def test_an_equal_seed_gives_an_equal_episode_and_another_seed_another(name: str):
    def act_by(seed: int):
        chance = random.Random(seed)
        return lambda environment: chance.choice([environment.solve(), *environment.actions()])

    played = [await play(ENVIRONMENTS[name](), seed, act_by(7)) for seed in (1, 1, *range(2, 12))]

    assert played[0] == played[1]
    assert len({repr(episode) for episode in played}) > 5


@pytest.mark.parametrize("name", INSTANT)
@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(
    actions=st.lists(st.text() | st.text(alphabet="( )[]/*+-0123456789 searchclickgoto\ud800"), max_size=3)
)
def test_garbage_is_answered_and_never_raises(name: str, actions: list[str]):
    environment = ENVIRONMENTS[name]()
    assert isinstance(environment, Instant)
    environment.reset(0, 0)

    for action in (*actions, "", "\0", "(" * 100_000, "9" * 100_000, "ü" * 1000 + "\n\n"):
        step = environment.step(action)
        assert -1 <= step.reward <= 1
        assert step.metrics["success"] in (0, 1)
        if step.done:
            break


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("countdown", {"count": 1}, "count"),
        ("countdown", {"turns": 0}, "turns"),
        ("household", {"chores": []}, "chores"),
        ("household", {"chores": ["wash_up"]}, "pick_and_place"),
        ("shop", {"items": 3}, "items"),
        ("shop", {"item": 3}, "Did you mean 'items'"),
        ("sokoban", {"size": 4}, "size"),
        ("sokoban", {"symbols": "emoji"}, "'letters', 'xsb' or 'words'"),
        ("word_game", {"length": 7}, "4, 5 or 6"),
    ],
)
def test_a_setting_out_of_range_is_refused_and_named(name: str, settings: dict[str, object], problem: str):
    with pytest.raises(ConfigError) as refused:
        check_settings(ENVIRONMENTS[name], settings, owner=name)

    assert str(refused.value).startswith(name)
    assert problem in str(refused.value)


@pytest.mark.parametrize("name", ["countdown", "household", "shop", "sokoban", "word_game"])
async def test_no_turns_left_cuts_an_episode_short(name: str):
    (episode,) = await episodes(name, {"turns": 2}, lambda _: "nonsense", range(1))

    last = episode.turns[-1][1]
    assert (len(episode.turns), last.done, last.truncated, episode.reward) == (2, True, True, 0.0)


@pytest.mark.parametrize("name", INSTANT)
async def test_the_farm_plays_what_the_solver_plays(name: str):
    alone = await play(ENVIRONMENTS[name](), 1, solve)
    farm = Play(ENVIRONMENTS[name], {})

    shown = await farm.reset(1, 0)
    steps = [await farm.step(Action(action)) for action, _ in alone.turns]

    assert (shown.text, shown.system, shown.reference) == (
        alone.shown.text,
        alone.shown.system,
        alone.shown.reference,
    )
    assert [(step.text, step.reward, step.done, step.state_hash) for step in steps] == [
        (step.text, step.reward, step.done, step.state_hash) for _, step in alone.turns
    ]


@pytest.mark.parametrize("name", ["countdown", "shop"])
async def test_a_tool_call_that_cannot_be_read_is_answered_with_why(name: str):
    farm = Play(ENVIRONMENTS[name], {"tools": True})
    await farm.reset(1, 0)

    step = await farm.step(Action("", tool_problem="The call is no JSON."))

    assert (step.text, step.reward, step.done) == ("The call is no JSON.", 0.0, False)


@pytest.mark.parametrize("name", ["countdown", "shop"])
async def test_tools_reach_the_farm(name: str):
    farm = Play(ENVIRONMENTS[name], {"tools": True})

    tools = (await farm.reset(1, 0)).tools
    first = tools[0]["function"]
    (argument,) = first["parameters"]["properties"]
    step = await farm.step(Action("", [ToolCall("a", first["name"], {argument: "7"})]))

    assert [(result.tool_call_id, result.name) for result in step.tool_results] == [("a", first["name"])]


async def test_scores_are_printed_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]):
    await print_scores(["arithmetic"], 3, as_json=False)
    table = capsys.readouterr().out.splitlines()
    await print_scores(["arithmetic"], 3, as_json=True)
    (score,) = json.loads(capsys.readouterr().out)

    assert table[0].split()[0] == "environment"
    assert table[1].split()[0] == "arithmetic"
    assert (score["environment"], score["solver_reward"], score["solver_success"]) == ("arithmetic", 1.0, 1.0)
    assert score["random_reward"] < 0.5


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


def test_guessing_not_a_number_costs_a_tenth_and_halving_always_suffices():
    environment = GuessNumber(high=20)
    environment.reset(3, 0)

    step = environment.step("seven")

    assert (step.text, step.reward) == ("number please", -0.1)


def test_a_number_with_zeros_before_it_is_that_number():
    environment = GuessNumber(high=20)
    number = environment.reset(3, 0).reference

    assert environment.step(f"0{number}").metrics == {"success": 1.0}


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
