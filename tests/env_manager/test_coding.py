import inspect
import json
import random
from collections.abc import Sequence
from typing import NoReturn

import pytest

from env_manager.environments.coding import Coding, program_in
from env_manager.environments.coding_exercise import Case, judge, make_exercise
from env_manager.environments.coding_tasks import TASKS, Task
from env_manager.environments.solvable import Solvable
from env_manager.playthrough import play
from rollfarm.env import Action, Step
from rollfarm.errors import SandboxFailed
from rollfarm.playing import Play
from rollfarm.sandbox import Limits, Program

SEEDS = range(4)
"""A few: each needs sandboxes of its own."""


async def tried(program: str, *, name: str = "f", cases: Sequence[Case] = (Case(1, 1), Case(2, 4)), **settings) -> Step:
    """What the environment answers to `program`, where these cases are both the shown and the hidden ones."""
    environment = Coding(turns=2, **settings)
    environment.reset(0, 0)
    object.__setattr__(environment._exercise, "name", name)
    object.__setattr__(environment._exercise, "shown", cases)
    object.__setattr__(environment._exercise, "hidden", cases)
    return await environment.step(program)


async def test_the_solver_passes_every_hidden_test_at_once():
    episodes = [await play(Coding(tests=1, hidden_tests=3), seed, lambda coding: coding.solve()) for seed in SEEDS]

    assert [(len(episode.turns), episode.reward, episode.success) for episode in episodes] == [(1, 1.0, 1.0)] * len(
        SEEDS
    )


async def test_programs_that_always_give_the_same_pass_few_hidden_tests():
    chance = random.Random(0)

    def act(coding: Solvable) -> str:
        return chance.choice(coding.actions())

    rewards = [(await play(Coding(turns=1), seed, act)).reward for seed in SEEDS]

    assert sum(rewards) / len(rewards) < 0.3


def test_equal_seeds_give_equal_exercises_and_others_others():
    statements = [Coding().reset(seed, 0).text for seed in (1, 1, *range(2, 30))]

    assert statements[0] == statements[1]
    assert len(set(statements)) > 20


async def test_what_fails_is_told_with_what_was_expected_and_where_it_raised():
    step = await tried("print('looking')\ndef f(n):\n    return n if n == 1 else 1 // 0")

    assert step.text.splitlines() == [
        "1 of 2 tests pass.",
        "f(2) raised ZeroDivisionError: integer division or modulo by zero (line 3).",
        "It printed:",
        "looking",
    ]
    assert (step.reward, step.done, step.metrics) == (0.0, False, {"success": 0.0, "shown_passed": 0.5})


async def test_the_last_turn_pays_the_share_of_hidden_tests_that_pass():
    environment = Coding(turns=1, tests=2, hidden_tests=4)
    environment.reset(0, 0)
    object.__setattr__(environment._exercise, "name", "f")
    object.__setattr__(environment._exercise, "hidden", (Case(1, 1), Case(2, 4), Case(3, 9), Case(1, 1)))

    step = await environment.step("def f(n): return 1")

    assert (step.reward, step.done, step.truncated, step.text) == (0.5, True, True, "")


async def test_what_an_agent_answers_is_judged_by_the_hidden_tests_at_once():
    environment = Coding(turns=5, tests=1, hidden_tests=2)
    environment.reset(0, 0)

    wrong, right = await environment.score([], "x = 1"), await environment.score([], environment.solve())

    assert (wrong.reward, wrong.done, wrong.truncated) == (0.0, True, True)
    assert (right.reward, right.done, right.truncated) == (1.0, True, False)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("def f(n:", "It raised SyntaxError: '(' was never closed"),
        ("x = 1", "There is no function f."),
        ("raise SystemExit", "It raised SystemExit:"),
        ("import os\nos._exit(0)", "0 of 2 tests pass.\nf(1) gave no answer."),
        ("def f(n): exit()", "f(1) raised SystemExit: None"),
        ("def f(n): return {1}", "f(1) raised TypeError: Object of type set is not JSON serializable"),
        ("def f(n): return f(n)", "f(1) raised RecursionError"),
        ("def f(n): return float(n)", "f(1) gave 1.0, not 1."),
        ("def f(n): return n == 1", "f(1) gave True, not 1."),
        ("", "There is no function f."),
        ("\ud800\0 \u00fc", "It raised"),
        ("def f(n): print('x' * 100_000)", "It wrote too much."),
    ],
)
async def test_a_program_that_is_no_good_fails_its_tests_in_words(program: str, told: str):
    step = await tried(program)

    assert told in step.text
    assert (step.reward, step.done) == (0.0, False)


async def test_a_program_that_hangs_is_stopped_and_keeps_the_tests_that_it_passed():
    step = await tried("def f(n):\n    while n > 1: pass\n    return n", seconds=1.0)

    assert step.text.splitlines() == ["1 of 2 tests pass.", "f(2) gave no answer.", "It took too long."]


FORGERIES = {
    "writes lines as the harness does": """
        import json, os
        for fd in range(1, 20):
            for line in ('{"at": 0, "value": null}', '{"at": 1, "passed": true}', "[]", '{"at": []}', "[" * 9999):
                try: os.write(fd, (line + "\\n").encode())
                except OSError: pass
        os._exit(0)
        """,
    "patches what compares and what is written": """
        import builtins, json, sys
        json.dumps = lambda *_, **__: '{"at": 0, "value": 1, "passed": true}'
        builtins.repr = builtins.str = lambda _: "4"
        class Equal(int):
            def __eq__(self, other): return True
            def __hash__(self): return 0
        def f(n): return Equal(7)
        """,
    "looks for what is expected wherever it can": """
        import gc, os, sys
        def f(n):
            frame, found = sys._getframe(1), [open("main.py").read(), str(os.environ), str(sys.argv)]
            while frame:
                found += [str(value) for value in frame.f_locals.values()]
                frame = frame.f_back
            found += [str(thing) for thing in gc.get_objects() if isinstance(thing, (dict, list, tuple))]
            wanted = "".join(("9876543", "2123456"))
            return int(wanted) if wanted in "".join(found) else 0
        """,
}


@pytest.mark.parametrize("how", FORGERIES)
async def test_a_verdict_cannot_be_forged(how: str):
    step = await tried(inspect.cleandoc(FORGERIES[how]), cases=(Case(3, 98765432123456), Case(4, 98765432123456)))

    assert step.metrics["shown_passed"] == 0.0


async def test_a_sandbox_that_fails_fails_the_episode_and_is_never_a_reward_of_0(monkeypatch: pytest.MonkeyPatch):
    class Broken:
        async def run(self, program: Program, limits: Limits) -> NoReturn:
            raise SandboxFailed("The cell died.")

    monkeypatch.setattr("env_manager.environments.coding.shared", Broken)
    coding = Play(Coding, {})
    await coding.reset(0, 0)

    with pytest.raises(SandboxFailed, match="The cell died"):
        await coding.step(Action("x = 1"))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.solution.__name__)
def test_every_task_has_a_whole_text_and_tests_of_several_answers(task: Task, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("env_manager.environments.coding_exercise.TASKS", (task,))

    exercises = [make_exercise(random.Random(seed), tests=3, hidden_tests=10) for seed in range(5)]

    for exercise in exercises:
        assert "{" not in exercise.statement
        assert exercise.statement.startswith(f"Write the Python function def {task.solution.__name__}(")
        assert (len(exercise.shown), len(exercise.hidden)) == (3, 10)
        assert len({repr(case.argument) for case in (*exercise.shown, *exercise.hidden)}) >= 12
        assert len({json.dumps(case.expected) for case in exercise.hidden}) >= 2
        assert len(exercise.statement) < 1500
    assert len({exercise.solution for exercise in exercises}) > 1


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.solution.__name__)
def test_the_solver_s_source_is_a_program_of_its_own_that_gives_what_the_tests_expect(
    task: Task, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("env_manager.environments.coding_exercise.TASKS", (task,))
    exercise = make_exercise(random.Random(0), tests=3, hidden_tests=10)
    module: dict[str, object] = {}

    exec(compile(exercise.solution, "solution.py", "exec"), module)

    cases = (*exercise.shown, *exercise.hidden)
    function = module[exercise.name]
    assert callable(function)
    lines = [json.dumps({"at": at, "value": function(case.argument)}) for at, case in enumerate(cases)]
    assert judge(exercise.name, cases, lines).share == 1.0


def test_the_last_fenced_block_is_the_program_and_without_one_everything_is():
    assert program_in("First\n```python\na = 1\n```\nno:\n```\nb = 2\n```\nDone.") == "b = 2\n"
    assert program_in("a = 1") == "a = 1"
