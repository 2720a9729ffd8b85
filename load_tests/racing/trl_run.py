"""One run of TRL, in its own Python: MODEL FILE SEED STEPS GENERATION. Writes a line of JSON at its begin and after
each step."""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingTypeStubs]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from env_manager.environments.frozen_lake import FrozenLake
from load_tests.racing.task import demo, is_reached


@dataclass
class Episode:
    """One walk over the lake, as tokens."""

    lake: FrozenLake
    messages: list[dict[str, str]]
    prompt: list[int]
    completion: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    """1 on tokens that the policy wrote."""

    reward: float = 0.0
    done: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.completion


def begin(tokenizer: Any, seed: int, settings: dict[str, Any]) -> Episode:
    lake = FrozenLake(**settings)
    messages = [{"role": "user", "content": lake.reset(seed, 0).text}]
    return Episode(lake, messages, render(tokenizer, messages))


def render(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def advance(tokenizer: Any, episode: Episode, token: int) -> None:
    """The policy wrote a token; the environment answers."""
    word = tokenizer.decode([token])
    episode.completion.append(token)
    episode.mask.append(1)
    step = episode.lake.step(word)
    episode.reward += step.reward
    episode.done = step.done
    if step.done:
        return
    episode.messages += [{"role": "assistant", "content": word}, {"role": "user", "content": step.text}]
    # Appended, never tokenised again: what the policy wrote may not be what the tokenizer would make of it.
    shown = render(tokenizer, [{"role": "user", "content": step.text}])
    # A turn that the policy ended itself is not ended again, as in the farm.
    closing = [tokenizer.eos_token_id] if token != tokenizer.eos_token_id else []
    episode.completion += closing + shown
    episode.mask += [0] * len(closing + shown)


def by_trl(trainer: Any, episodes: Sequence[Episode]) -> list[int]:
    """A token for each, by the method that TRL's own loop of turns calls."""
    completions, _ = trainer._generate_single_turn([each.ids for each in episodes], None, {}, 1)
    return [ids[0] for ids in completions]


def by_one_pass(trainer: Any, episodes: Sequence[Episode]) -> list[int]:
    """A token for each, by one forward pass padded on the right."""
    longest = max(len(each.ids) for each in episodes)
    ids_RT = torch.tensor([each.ids + [0] * (longest - len(each.ids)) for each in episodes])
    last_R = torch.tensor([len(each.ids) - 1 for each in episodes])
    with torch.no_grad():
        hidden_RTH = trainer.model.base_model(input_ids=ids_RT, use_cache=False).last_hidden_state
        probs_RV = trainer.model.lm_head(hidden_RTH[torch.arange(len(episodes)), last_R]).softmax(-1)
    return torch.multinomial(probs_RV, 1).squeeze(-1).tolist()


GENERATIONS = {"trl": by_trl, "one_pass": by_one_pass}


def main(model_path: str, file: str, seed: str, steps: str, generation: str) -> None:
    generate = GENERATIONS[generation]
    config = demo()
    run, training = config["run"], config["trainer"]
    settings = run["domains"][0]["settings"]
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    torch.manual_seed(int(seed))
    told = Path(file).open("w")  # noqa: SIM115 (for as long as the process lives)

    def tell(**line: object) -> None:
        print(json.dumps({"time": time.time(), **line}), file=told, flush=True)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        if not trainer.state.global_step:
            tell(begins=True)
        episodes = [begin(tokenizer, int(prompt), settings) for prompt in prompts]
        while playing := [each for each in episodes if not each.done]:
            for each, token in zip(playing, generate(trainer, playing), strict=True):
                advance(tokenizer, each, token)
        return {
            "prompt_ids": [each.prompt for each in episodes],
            "completion_ids": [each.completion for each in episodes],
            "logprobs": None,
            "env_mask": [each.mask for each in episodes],
            "earned": [each.reward for each in episodes],
        }

    def earned(earned: list[float], **_: object) -> list[float]:
        rewards.append(sum(earned) / len(earned))
        return earned

    rewards: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            tell(reward=rewards[-1])
            if is_reached(rewards):
                control.should_training_stop = True

    count = run["batch_groups"] * run["group_size"]
    dataset = Dataset.from_dict({"prompt": [str(number) for number in range(run["batch_groups"] * int(steps))]})
    with tempfile.TemporaryDirectory(prefix="rf-trl-") as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=earned,
            rollout_func=rollout,
            train_dataset=dataset,
            callbacks=[Watch()],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=count,
                num_generations=run["group_size"],
                max_steps=int(steps),
                max_completion_length=512,
                generation_kwargs={"max_new_tokens": run["sampling"]["max_tokens"]},
                learning_rate=training["lr"],
                adam_beta1=0.9,
                adam_beta2=0.95,
                weight_decay=0.0,
                max_grad_norm=1.0,
                lr_scheduler_type="constant",
                epsilon=0.2,
                epsilon_high=0.28,
                beta=0.0,
                loss_type="dapo",
                temperature=1.0,
                seed=int(seed),
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to=[],
                logging_steps=50,
                disable_tqdm=True,
            ),
        )
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
