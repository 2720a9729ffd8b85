"""A conversation with a user who is played by another model, behind any OpenAI-compatible endpoint.

The user has a wish, and knows a number that is needed for it: of an order, of a ticket, of a contract. The policy
serves the user, and has to find the number out and confirm it, so that no judge is needed. The user says at first what
is wrong, tells the number when asked for it, and ends the conversation with [END] when it is fed up. Whatever fails at
the endpoint fails the episode, and never counts against the policy.

Reward. Confirming the number pays 0.5, and 0.5 more for the share of turns that are left; everything else pays nothing.
A turn that names more than one number of six digits confirms none.
"""

import random
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from env_manager.environments.solvable import Solvable
from rollfarm.config import Config
from rollfarm.endpoint import Endpoint, EndpointConfig, shared
from rollfarm.env import Observation, Step
from rollfarm.errors import EndpointFailed

END = "[END]"
"""With this, the user ends the conversation."""

NUMBER = re.compile(r"(?<!\d)\d{6}(?!\d)")


class Persona(Config):
    """Who the user is."""

    who: str
    """The user and the wish, for example "Ada, whose parcel has not come"."""

    fact: str
    """What the number is of, for example "order number"."""


PERSONAS = (
    Persona(who="Ada, polite and in a hurry, whose parcel has not come", fact="order number"),
    Persona(who="Ben, who is annoyed and writes little, and whose internet is down", fact="contract number"),
    Persona(who="Carmen, who tells stories and wants to move her dentist's appointment", fact="patient number"),
    Persona(who="Dev, who is not good with computers, and cannot log in", fact="account number"),
    Persona(who="Emeka, who missed his train and wants his money back", fact="ticket number"),
    Persona(who="Freya, who doubts everything, and whose new washing machine leaks", fact="serial number"),
)

USER = """\
You play a customer who writes to a service desk: {who}. Stay in this part; never say that you are a model, and never \
play the service desk. Write one or two short sentences at a time.
Your {fact} is {number}. Do not tell it before you are asked for it; when you are, tell it.
When the service desk has confirmed your {fact}, or you are fed up, write {end}."""

BEGIN = "(The service desk is listening. Say what is wrong.)"

DESK = (
    "You are the service desk. Find out the {fact} of the customer who writes to you, and confirm it by writing it "
    "once, all six digits."
)


class Dialogue(Solvable):
    """Multi-turn help for a simulated user."""

    name = "dialogue"

    def __init__(
        self,
        *,
        user: EndpointConfig | None = None,
        personas: Annotated[Sequence[Persona], Field(min_length=1)] = PERSONAS,
        turns: Annotated[int, Field(ge=1)] = 8,
        max_tokens: Annotated[int, Field(ge=1)] = 120,
        temperature: Annotated[float, Field(ge=0)] = 1.0,
    ) -> None:
        """`user` is the endpoint of the model that plays the user, whose words `max_tokens` and `temperature` bound;
        without it the user is a plain one of fixed words, for trying things out."""
        self._user = user
        self._personas = personas
        self._turns = self._turns_left = turns
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._said: list[dict[str, str]] = []
        self._number = ""

    async def reset(self, seed: int, index: int) -> Observation:
        chance = random.Random(seed)
        self._persona = chance.choice(self._personas)
        self._number = f"{chance.randrange(10**6):06}"
        self._seed = chance.randrange(2**31)
        first = await self._answer(BEGIN)
        return Observation(first, reference=self._number, system=DESK.format(fact=self._persona.fact))

    async def step(self, action: str) -> Step:
        self._turns_left -= 1
        if NUMBER.findall(action) == [self._number]:
            reward = 0.5 + 0.5 * self._turns_left / self._turns
            return Step(reward=reward, done=True, metrics={"success": 1.0})
        if not self._turns_left:
            return Step(done=True, truncated=True, metrics={"success": 0.0})
        words = await self._answer(action)
        return Step(words.replace(END, "").strip(), done=END in words, metrics={"success": 0.0})

    def solve(self) -> str:
        """Ask, and confirm what the user told."""
        told = NUMBER.findall(self._said[-1]["content"])
        return f"Thank you, it is {told[-1]}." if told else f"What is your {self._persona.fact}?"

    def actions(self) -> Sequence[str]:
        return ("I am sorry.", "What is wrong?", f"What is your {self._persona.fact}?", "Thank you, it is 123456.")

    async def _answer(self, words: str) -> str:
        """What the user says to `words`. Of the conversation, the user wrote the assistant's part."""
        self._said.append({"role": "user", "content": words})
        if self._user is None:
            answer = self._plain_answer(words)
        else:
            answer = await self._ask(shared(self._user))
        self._said.append({"role": "assistant", "content": answer})
        return answer

    async def _ask(self, user: Endpoint) -> str:
        persona = self._persona
        part = USER.format(who=persona.who, fact=persona.fact, number=self._number, end=END)
        messages = [{"role": "system", "content": part}, *self._said]
        seed = self._seed + len(self._said)
        words = await user.complete(messages, max_tokens=self._max_tokens, temperature=self._temperature, seed=seed)
        if not words.strip():
            raise EndpointFailed("The user said nothing.")
        return words

    def _plain_answer(self, words: str) -> str:
        persona = self._persona
        if persona.fact in words:
            return f"My {persona.fact} is {self._number}."
        return f"This is {persona.who}." if words == BEGIN else "What else do you need to know?"
