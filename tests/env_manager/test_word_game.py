import pytest

from env_manager.environments.word_game import WordGame, feedback
from env_manager.environments.word_list import WORDS

MARKS = {"r": "right", "e": "elsewhere", "-": "absent"}


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "rrrrr"),
        ("crane", "solid", "-----"),
        ("speed", "erase", "e-ee-"),
        ("eerie", "speed", "ee---"),
        ("allow", "lemon", "-e-r-"),
        ("llama", "label", "ree--"),
        ("geese", "eagle", "ee--r"),
    ],
)
def test_a_letter_is_elsewhere_as_often_as_the_secret_has_more_of_it(guess: str, secret: str, marks: str):
    assert list(feedback(guess, secret)) == [MARKS[mark] for mark in marks]


@pytest.mark.parametrize("length", sorted(WORDS))
def test_the_list_has_hundreds_of_plain_words_each_once(length: int):
    words = WORDS[length]

    assert len(words) == len(set(words)) > 200
    assert all(word.isascii() and word.islower() and word.isalpha() and len(word) == length for word in words)


@pytest.mark.parametrize("length", sorted(WORDS))
def test_the_solver_finds_words_of_every_shape_in_six_turns(length: int):
    for secret in WORDS[length][::7]:
        environment = WordGame(length=length)  # pyright: ignore[reportArgumentType]
        environment.reset(0, 0)
        environment._secret = secret
        while not (step := environment.step(environment.solve())).done:
            pass
        assert step.metrics["success"], secret


def test_new_right_letters_pay_their_share_once_and_the_word_the_rest():
    environment = WordGame()
    environment.reset(0, 0)
    environment._secret = "crane"

    first = environment.step("Perhaps\nCRATE")
    again = environment.step("brace")
    found = environment.step("crane")

    # "cra.e" is four of five letters, "brace" adds none, and three of six turns are left at the end.
    assert (first.text, first.reward) == ("right right right absent right", pytest.approx(0.3 * 4 / 5))
    assert again.reward == 0.0
    assert (found.reward, found.text, found.done) == (pytest.approx(0.3 / 5 + 0.4 + 0.3 / 2), "", True)


@pytest.mark.parametrize("action", ["", "cran", "cranes", "cr4ne", "cräne", "two words"])
def test_what_is_no_word_of_that_length_costs_a_turn(action: str):
    environment = WordGame(turns=2)
    environment.reset(0, 0)

    step = environment.step(action)

    assert (step.text, step.reward, step.done) == ("a word of 5 letters please", 0.0, False)
    assert environment.step(action).truncated


def test_a_hash_tells_what_is_known_apart():
    def after(seed: int, *guesses: str) -> str:
        environment = WordGame()
        environment.reset(seed, 0)
        return [environment.step(guess).state_hash for guess in guesses][-1]

    assert after(1, "crane", "solid") == after(1, "solid", "nonsense", "crane") != after(1, "crane")
    assert after(1, "crane") != after(2, "crane")
