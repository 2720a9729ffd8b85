"""The tables of [trainer] that say what a sample is worth: shaping, KL, critic and teacher."""

from typing import Literal

from pydantic import Field, model_validator

from rollfarm.config import Config, ConfigError

Estimator = Literal["k1", "k2", "k3", "abs"]
"""A name of trainer.algorithms.divergence."""

BY_CRITIC, BY_TEACHER = ("gae",), ("opd",)
"""The advantages of trainer.algorithms.advantages that ask a critic or a teacher."""


class ShapingConfig(Config):
    """What becomes of rewards before they are compared, and of advantages before they are learnt from. The defaults
    change nothing. The fields are applied in this order."""

    overlong_tokens: int = Field(default=0, ge=0)
    """Tokens of the policy at which a trajectory has lost the whole `overlong_penalty`. 0 has no penalty."""

    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before `overlong_tokens` in which the penalty rises from 0, linearly. 0 is a cliff."""

    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward that the longest trajectories lose."""

    reward_normalization: Literal["none", "group", "batch", "running"] = "none"
    """Rewards minus a mean, in units of a standard deviation: of the group, of the batch, or of all rewards of the run
    until now. A deviation of 0 makes them 0."""

    reward_clip: float = Field(default=0.0, ge=0)
    """Rewards are bounded to plus and minus this. 0 has no bound."""

    whiten: bool = False
    """Advantages minus their mean over all tokens of the batch, in units of their standard deviation there."""

    advantage_clip: float = Field(default=0.0, ge=0)
    """Advantages are bounded to plus and minus this. 0 has no bound."""

    length_weight: float = 0.0
    """Each advantage is multiplied by (mean tokens of a trajectory / tokens of its own) to this power. 0 weighs tokens
    alike, 1 whole trajectories, so that long ones are not learnt from more than short ones."""

    drop_truncated: bool = False
    """Whether a trajectory that a limit ended is compared with the others, but not learnt from itself."""

    difficulty_low: float | None = None
    """Groups whose mean reward, as it was scored, is at most this are not learnt from. Unset drops none; 0 drops those
    that always fail, where rewards are 0 and 1."""

    difficulty_high: float | None = None
    """The same for groups whose mean reward is at least this. 1 drops those that always succeed."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> "ShapingConfig":
        if self.overlong_buffer > self.overlong_tokens:
            raise ValueError("overlong_buffer is more than overlong_tokens. Lower it, or set overlong_tokens.")
        return self


class KlConfig(Config):
    """How the policy is held near a reference: by what it is paid, by its loss, or not at all."""

    reference: str = ""
    """The reference model: a folder, or a name of the hub. Empty is the model that the run began with."""

    penalty: float = Field(default=0.0, ge=0)
    """What a token is charged for each nat of its KL to the reference, in units of reward. 0 charges nothing."""

    penalty_estimator: Estimator = "k1"
    """How that KL is estimated from the token that was sampled, which pays: a name of trainer.algorithms.divergence."""

    target: float = Field(default=0.0, ge=0)
    """KL of a trajectory, in nats, that `penalty` is steered to from its first value. 0 leaves it fixed."""

    gain: float = Field(default=0.1, gt=0)
    """How fast it is steered: by at most 0.2 * gain in a step."""

    loss: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss of each token. 0 has none."""

    loss_estimator: Estimator | Literal["full"] = "k3"
    """How that KL is estimated. In a loss, "k1" has no gradient on average: it is there for comparison. "full" is no
    estimate but the sum over all words; every rank then holds the whole reference, and computes it in each pass."""

    @model_validator(mode="after")
    def _can_be_steered(self) -> "KlConfig":
        if self.target and not self.penalty:
            raise ValueError("target steers penalty, which is 0. Give penalty a first value, such as 0.01.")
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether there is anything to ask a reference."""
        return self.penalty > 0 or self.loss > 0

    @property
    def is_exact(self) -> bool:
        """Whether the loss has the sum over all words."""
        return self.loss > 0 and self.loss_estimator == "full"

    @property
    def scores_reference(self) -> bool:
        """Whether the reference is asked about the tokens that were sampled."""
        return self.penalty > 0 or (self.loss > 0 and not self.is_exact)


class CriticConfig(Config):
    """A second model of the policy's kind, which learns what to expect of each token: for the advantage "gae"."""

    path: str = ""
    """The model that it begins with: a folder, or a name of the hub. Empty is the policy's."""

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate; it has the policy's warm-up and schedule."""

    clip: float = Field(default=0.2, ge=0)
    """How far from its old estimate a new one is rewarded for being better, in units of reward. 0 has no bound."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the beginning of the run in which it learns alone. They use batches, and the policy stands still."""


class TeacherConfig(Config):
    """A model that says how likely it finds each token of the policy, for on-policy distillation."""

    path: str
    """A folder, or a name of the hub; with the policy's vocabulary."""

    coef: float = Field(default=0.0, ge=0)
    """Times (log teacher - log policy) of a token, added to its advantage after all shaping. 0 adds nothing: for the
    advantage "opd", which is that alone."""


def check_roles(advantage: str, critic: CriticConfig | None, teacher: TeacherConfig | None) -> None:
    """Raise ConfigError unless an advantage has the models that it asks, and each model is asked. One's own advantage
    may ask either."""
    own = ":" in advantage
    if advantage in BY_CRITIC and critic is None:
        raise ConfigError(
            f"trainer.advantage: {advantage!r} needs a critic. Add [trainer.critic], or choose an advantage without "
            "one, such as 'grpo'."
        )
    if critic is not None and not own and advantage not in BY_CRITIC:
        raise ConfigError(
            f"trainer.critic: the advantage {advantage!r} does not ask it. Remove the table, or set trainer.advantage "
            "to 'gae'."
        )
    if advantage in BY_TEACHER and teacher is None:
        raise ConfigError(f"trainer.advantage: {advantage!r} needs a teacher. Give its model by trainer.teacher.path.")
    if teacher is not None and not own and advantage not in BY_TEACHER and teacher.coef == 0:
        raise ConfigError(
            f"trainer.teacher: the advantage {advantage!r} does not ask it. Set trainer.teacher.coef above 0 to add "
            "what it says, or trainer.advantage to 'opd', or remove the table."
        )
