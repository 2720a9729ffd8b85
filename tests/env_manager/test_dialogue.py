"""The simulated user, played by a model behind llm_proxy's own front door."""

import json
import re
from typing import Any

import pytest

from env_manager.environments.dialogue import PERSONAS, Dialogue
from env_manager.playthrough import play
from env_manager.rendering import Renderer
from rollfarm.config import ConfigError
from rollfarm.env import Action
from rollfarm.errors import EndpointFailed
from rollfarm.playing import Play
from rollfarm.ports import free_ports
from rollfarm.registry import check_settings
from rollfarm.v1 import trajectory_pb2
from tests.env_manager.fakes import FakeBuffer, FakeRewards, episode, working
from tests.llm_proxy import models
from tests.llm_proxy.fronts import MODEL, World, scripted

KEYS = {"user": "env:USER_KEY"}


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_KEY", "the-key-of-the-simulated-user")


def user_at(proxy: World) -> dict[str, Any]:
    url = f"{proxy.front.http.base_url}/v1"
    return {"base_url": url, "model": MODEL, "key": "env:USER_KEY", "retries": 0}


def customer(prompt: str) -> str:
    """Tells the number when asked for it, and leaves when it hears nonsense."""
    last = prompt.rsplit("<|im_start|>user", 1)[1]
    if "listening" in last:
        return "It has not come.<|im_end|>"
    if "nonsense" in last:
        return "Good bye. [END]<|im_end|>"
    number = re.findall(r"number is (\d{6})", prompt)[0]
    return f"It is {number}.<|im_end|>" if "What is your" in last else "Well?<|im_end|>"


def dialogue(proxy: World, **more: Any) -> Play:
    return Play(Dialogue, check_settings(Dialogue, {"user": user_at(proxy), **more}, owner="dialogue"))


async def test_the_policy_finds_the_number_out_and_confirms_it():
    async with scripted(customer, keys=KEYS) as (proxy, script):
        world = dialogue(proxy, turns=4)

        shown = await world.reset(7, 0)
        small_talk = await world.step(Action("How are you?"))
        told = await world.step(Action("What is your number?"))
        end = await world.step(Action(f"So it is {shown.reference}."))

        assert (shown.text, "confirm it" in shown.system) == ("It has not come.", True)
        assert (small_talk.text, small_talk.done) == ("Well?", False)
        assert told.text == f"It is {shown.reference}."
        assert (end.done, end.reward, dict(end.metrics)) == (True, 0.5 + 0.5 * 1 / 4, {"success": 1.0})
        user_saw = models.decode(script.prompts[-1])
        assert "Do not tell it before you are asked" in user_saw
        assert "How are you?<|im_end|>\n<|im_start|>assistant\nWell?" in user_saw


async def test_the_user_may_end_it_and_so_may_the_turns():
    async with scripted(customer, keys=KEYS) as (proxy, _):
        left, late = dialogue(proxy), dialogue(proxy, turns=1)
        await left.reset(7, 0)
        await late.reset(7, 0)

        left_end = await left.step(Action("nonsense"))
        late_end = await late.step(Action("What is your number?"))

        assert (left_end.text, left_end.done, left_end.truncated, left_end.reward) == ("Good bye.", True, False, 0.0)
        assert (late_end.done, late_end.truncated, dict(late_end.metrics)) == (True, True, {"success": 0.0})


async def test_naming_many_numbers_confirms_none():
    async with scripted(customer, keys=KEYS) as (proxy, _):
        world = dialogue(proxy)
        shown = await world.reset(7, 0)

        step = await world.step(Action(f"It is 123456 or {shown.reference}."))

        assert (step.done, step.reward) == (False, 0.0)


@pytest.mark.parametrize("written", ["<|im_end|>", "  <|im_end|>"])
async def test_a_user_who_says_nothing_is_a_failure_of_the_environment(written: str):
    async with scripted(lambda prompt: written, keys=KEYS) as (proxy, _):
        with pytest.raises(EndpointFailed, match="The user said nothing"):
            await dialogue(proxy).reset(7, 0)


async def test_an_endpoint_that_is_away_is_a_failure_of_the_environment():
    away = {"base_url": f"http://127.0.0.1:{free_ports(1)}/v1", "model": "m", "retries": 0}
    world = Play(Dialogue, check_settings(Dialogue, {"user": away}, owner="dialogue"))

    with pytest.raises(EndpointFailed, match="APIConnectionError"):
        await world.reset(7, 0)


async def test_the_policy_and_its_user_may_be_behind_one_llm_proxy():
    def write(prompt: str) -> str:
        if "You play a customer" in prompt:
            return customer(prompt)
        told = re.findall(r"It is (\d{6})", prompt)
        return (f"Thank you: {told[0]}" if told else "What is your number?") + "<|im_end|>"

    async with scripted(write, keys=KEYS) as (proxy, _):
        buffer, rewards = FakeBuffer(), FakeRewards()
        buffer.add(episode("dialogue", settings=json.dumps({"user": user_at(proxy)}), max_tokens=100))
        renderer = Renderer(models.tokenizer())
        async with working(buffer, proxy.address, rewards, renderer=renderer, context_tokens=2000):
            await buffer.until(lambda: bool(buffer.completed or buffer.failed), 60)

        assert not buffer.failed
        (trajectory,) = buffer.completed.values()
        assert trajectory.outcome == trajectory_pb2.OUTCOME_OK
        assert (trajectory.reward, dict(trajectory.metrics)) == (0.5 + 0.5 * 6 / 8, {"success": 1.0})


async def test_an_equal_seed_gives_an_equal_user_and_every_persona_comes():
    shown = [await Dialogue().reset(seed, 0) for seed in (1, 1, *range(60))]

    assert shown[0] == shown[1]
    assert len({each.text for each in shown}) == len(PERSONAS)
    assert len({each.reference for each in shown}) == 60


async def test_the_solver_succeeds_with_the_plain_user_and_given_personas():
    given = check_settings(Dialogue, {"personas": [{"who": "Zoë", "fact": "house number"}]}, owner="dialogue")

    episode = await play(Dialogue(**given), 3, lambda environment: environment.solve())

    assert episode.shown.text == "This is Zoë."
    assert [action for action, _ in episode.turns] == [
        "What is your house number?",
        f"Thank you, it is {episode.shown.reference}.",
    ]
    assert (episode.success, episode.reward) == (1.0, 0.5 + 0.5 * 6 / 8)


def test_a_key_in_the_settings_is_refused():
    with pytest.raises(ConfigError, match="a key is not kept in files"):
        check_settings(Dialogue, {"user": {"base_url": "http://x/v1", "model": "m", "key": "sk-1"}}, owner="dialogue")
