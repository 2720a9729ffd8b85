"""What the trainer reads from the farm's file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rollfarm.config import Config, ConfigError, Listen, Root, Telemetry, nearest
from rollfarm.registry import check_outline, outline
from rollfarm.run import ModelConfig, RunConfig
from trainer.algorithm_config import CriticConfig, KlConfig, ShapingConfig, TeacherConfig, check_roles
from trainer.backend_config import (
    DeepSpeedConfig,
    Fsdp2Config,
    LoraConfig,
    MegatronConfig,
    OptimizerName,
    check_backend,
)
from trainer.evaluation.config import EvaluationConfig
from trainer.offline.config import OfflineConfig
from trainer.trackers import config as trackers_config
from trainer.trackers.config import SamplesConfig, TrackerConfig

Setting = bool | int | float | str

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")
"""Kinds of torch devices, and "auto"."""

REGISTRIES = {
    "advantage": ("trainer.algorithms.advantages", "ADVANTAGES"),
    "loss": ("trainer.algorithms.losses", "LOSSES"),
    "correction": ("trainer.algorithms.correction", "CORRECTIONS"),
    "aggregation": ("trainer.algorithms.aggregation", "AGGREGATIONS"),
}
"""Where each kind of algorithm is registered."""


class WarmStartConfig(Config):
    """Supervised steps on recorded conversations, before the first publication of a new run."""

    data: Path | None = None
    """A JSONL file with {"messages": [{"role", "content"}, ...]} on each line. Unset skips the warm start."""

    steps: int = Field(default=100, ge=0)
    """Optimiser steps. 0 skips the warm start."""

    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate; it falls to zero over the steps."""

    batch_size: int = Field(default=32, ge=1)
    """Conversations in a step."""


class TrainerConfig(Config):
    """The trainer: its optimiser, its objective, its checkpoints and how it sends weights."""

    listen: Listen = Listen(port=7705)
    """Where TrainerService listens, on rank 0."""

    telemetry: Telemetry = Telemetry()
    """Logs and metrics."""

    sample_buffer_address: str = "127.0.0.1:7703"
    """host:port of sample_buffer."""

    llm_proxy_address: str = "127.0.0.1:7701"
    """host:port of llm_proxy."""

    seed: int = 0
    """Seeds what is random in the trainer: what adapters begin with, the order of the warm start and of records, which
    of these are held out, and the shuffled control. Nothing is dropped out."""

    backend: Literal["torch", "fsdp2", "deepspeed", "megatron"] = "torch"
    """What holds and trains the model: "torch" has all of it on every rank, "fsdp2" has shards of it over all ranks,
    "deepspeed" as many of its parts in shards as its stage says, "megatron" cuts it along matrices, layers, positions
    and experts."""

    fsdp2: Fsdp2Config = Fsdp2Config()
    """The backend "fsdp2"."""

    megatron: MegatronConfig = MegatronConfig()
    """The backend "megatron"."""

    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """The backend "deepspeed"."""

    lora: LoraConfig | None = None
    """Adapters, which learn in place of the model."""

    device: str = "auto"
    """A torch device, such as "cuda:1". "auto" takes an accelerator where there is one, and the CPU otherwise."""

    colocated: bool = False
    """Trainer and engines are on the same devices and take turns: engines sleep, without weights, while the trainer
    learns, and its models are in host memory while they generate. Requests that run then are interrupted, which
    run.alpha 0 leaves none of, and go on afterwards. False: each has devices of its own."""

    threads: int = Field(default=1, ge=0)
    """Threads of one torch operation. 0 is torch's own choice, which slows every service down on a shared machine."""

    optimizer: OptimizerName = "adamw"
    """What turns gradients into steps: "adamw"; "adamw_8bit", whose moments take a quarter of the memory; or "muon" for
    the matrices of hidden layers, and AdamW for the rest, at the same learning rate."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate. A large model wants about 1e-6, the demo's tiny one 1e-3."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after its warm-up; the last two fall to zero at run.steps, or over
    trainer.offline.epochs."""

    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises from zero."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; vectors (norms, biases) are never decayed."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of Adam's first and second moments."""

    max_grad_norm: float = Field(default=1.0, ge=0)
    """The gradient is scaled down to this norm. 0 never scales."""

    advantage: str = "grpo"
    """How rewards become advantages: a name of trainer.algorithms.advantages, or "module:function"."""

    advantage_settings: dict[str, Setting] = {}
    """The function's keyword-only parameters."""

    loss: str = "clipped"
    """The objective per token: a name of trainer.algorithms.losses, or "module:function"."""

    loss_settings: dict[str, Setting] = {}
    """The function's keyword-only parameters, such as clip_high."""

    correction: str = "none"
    """What each token's loss is multiplied by where samples are stale: a name of trainer.algorithms.correction, or
    "module:function". A loss whose `anchor` is "behavior", which is the default, corrects by its own ratio and wants
    none; one whose anchor is "proximal" wants "truncated" or "masked"."""

    correction_settings: dict[str, Setting] = {}
    """The function's keyword-only parameters."""

    aggregation: str = "token_mean"
    """How tokens become one number: a name of trainer.algorithms.aggregation, or "module:function"."""

    aggregation_settings: dict[str, Setting] = {}
    """The function's keyword-only parameters."""

    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which is subtracted from the loss of each token. 0 has none; the entropy is
    measured in any case."""

    shaping: ShapingConfig = ShapingConfig()
    """Rewards and advantages, bent."""

    kl: KlConfig = KlConfig()
    """Nearness to a reference."""

    critic: CriticConfig | None = None
    """A critic, where the advantage asks one."""

    teacher: TeacherConfig | None = None
    """A teacher, where the policy is distilled from one."""

    steps_per_batch: int = Field(default=1, ge=1)
    """Optimiser steps that the rows of a batch are dealt to. Above 1 the ratio's proximal policy is that
    before the first of them, which costs one more forward pass."""

    passes: int = Field(default=1, ge=1)
    """How often a batch is trained on. More than once is cheaper than more samples, and seldom better."""

    shuffle_scores: bool = False
    """A negative control, never for training: scores are dealt at random to the batch's trajectories, so nothing can be
    learnt from them, and a reward that rises all the same was not earned."""

    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens of one forward pass, and of padding where there is any; a longer row has a pass of its own. Memory grows
    with it, results do not change."""

    packing: bool = True
    """Rows go through the model end to end, with nothing between them. Architectures that cannot be told where a row
    ends have rows padded all the same, and the log says so. False pads always: results do not change, and it is faster
    only where rows are equally long."""

    rank_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long data-parallel ranks wait for each other in a step. A rank that dies takes the others down at once."""

    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints. A crash repeats at most as many; sample_buffer keeps their batches until then."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept in run.folder/run.name/checkpoints."""

    keep_best: int = Field(default=0, ge=0)
    """Checkpoints kept besides: those that validated best by best_metric. Each validation then has a checkpoint. 0
    keeps none."""

    best_metric: str = "reward"
    """What keep_best goes by: "reward", or a name that the environment measures, such as "success"."""

    validation_every: int = Field(default=0, ge=0)
    """Steps between validations besides those before the first step and after the last. 0 has only these two."""

    validation_episodes: int = Field(default=64, ge=0)
    """Episodes of one validation. 0 never validates."""

    validation_timeout_seconds: float = Field(default=600.0, gt=0)
    """A validation that takes longer is given up, with a warning; training goes on."""

    transport: Literal["gloo", "nccl", "store", "ipc"] = "gloo"
    """How weights reach engines: "gloo" broadcasts them, "nccl" does by GPUs; "store" writes files that engines read,
    and then only what changed, or the adapter where only that learns; "ipc" is memory of a machine that both share."""

    store_folder: Path | None = None
    """With "store": a folder of this run alone, under the same path for every engine host. Twice the model's size, on a
    tmpfs of memory. Unset is run.folder/run.name/weights."""

    store_deltas: bool = True
    """With "store": an engine that serves a version before gets the tensors that differ. An engine host of vLLM or
    SGLang keeps the whole version in memory for it."""

    weights_host: str = "127.0.0.1"
    """This machine's address for weights, as engines reach it: an IP address, or a name that leads to it here too."""

    weights_port: int = Field(default=0, ge=0, le=65535)
    """Where engines meet the trainer; weights then flow over ephemeral ports. 0 lets the system choose."""

    bucket_size_mb: int = Field(default=16, ge=1)
    """Size of one broadcast, in MiB. 4 to 64 is fastest; sender and receiver hold one each."""

    update_mode: Literal["keep", "keep_cache", "resume", "drain"] = "keep"
    """What becomes of running requests when weights change: "keep" computes their KV again under the new weights,
    "keep_cache" goes on with the old KV, "resume" queues them again from their tokens, "drain" lets them finish within
    llm_proxy.drain_timeout_seconds, while others wait."""

    rolling_engines: int = Field(default=0, ge=0)
    """Engines that change weights at a time while the others go on serving the version before, so that the farm never
    stands still; meanwhile two versions are served. 0 changes all at once, in one short pause."""

    transfer_timeout_seconds: float = Field(default=60.0, gt=0)
    """An engine that does not take a version within this time is left behind, and tried again later. So is one that
    does not change to it within this time; of rolling_engines each has its own, and a drain comes on top."""

    trackers: list[TrackerConfig] = []
    """Where else the run's figures go, besides metrics.jsonl. One that fails or hangs never stops training."""

    samples: SamplesConfig = SamplesConfig()
    """Trajectories shown as text."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """What `rollfarm evaluate` does in place of training."""

    offline: OfflineConfig | None = None
    """`rollfarm train`: what it trains on in place of a farm's episodes."""

    exit_when_finished: bool = False
    """Exit after the last step. Otherwise the trainer goes on answering GetProgress, and serves the final weights to
    engines that restart, until SIGTERM."""

    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised steps first."""

    @property
    def needs_reference(self) -> bool:
        """Whether there is anything to ask a reference."""
        return self.offline.pipeline == "dpo" if self.offline else self.kl.needs_reference

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        kind, separator, number = device.partition(":")
        if kind not in DEVICES or (separator and not number.isdecimal()):
            raise ValueError(f"{device!r} is no device.{nearest(kind, DEVICES)}")
        return device


class TrainerRoot(Root):
    """The trainer's part of a farm's file."""

    run: RunConfig = RunConfig()
    """What the run is."""

    model: ModelConfig = ModelConfig()
    """What it trains."""

    trainer: TrainerConfig = TrainerConfig()
    """How it trains."""

    def check(self) -> None:
        algorithms = {
            "advantage": (self.trainer.advantage, self.trainer.advantage_settings),
            "loss": (self.trainer.loss, self.trainer.loss_settings),
            "correction": (self.trainer.correction, self.trainer.correction_settings),
            "aggregation": (self.trainer.aggregation, self.trainer.aggregation_settings),
        }
        for key, (name, settings) in algorithms.items():
            try:
                check_outline(outline(*REGISTRIES[key]), name, settings, what=key)
            except ConfigError as error:
                raise ConfigError(f"trainer.{key}: {error}") from None
        check_backend(self.trainer.backend, self.trainer.optimizer, self.trainer.lora)
        if self.trainer.offline is None:
            check_roles(self.trainer.advantage, self.trainer.critic, self.trainer.teacher)
        else:
            self._check_offline(self.trainer.offline)
        has_end = self.run.steps or (self.trainer.offline and self.trainer.offline.epochs)
        if self.trainer.lr_schedule != "constant" and not has_end:
            raise ConfigError(
                f"trainer.lr_schedule: {self.trainer.lr_schedule!r} falls to zero at run.steps, and with 0 of them a "
                "run has no end. Set run.steps, or choose 'constant'."
            )
        warm, kl = self.trainer.warm_start, self.trainer.kl
        if warm.data is not None and warm.steps and kl.needs_reference and not kl.reference:
            raise ConfigError(
                "trainer.kl.reference: empty, which is the model before the warm start. Name the model to stay near: "
                "that model itself, or what an earlier warm start exported."
            )
        if kl.is_exact and self.trainer.backend == "megatron":
            raise ConfigError(
                "trainer.kl.loss_estimator: 'full' sums over the vocabulary, which the backend 'megatron' cuts over "
                "ranks. Choose an estimate such as 'k2', or trainer.backend = 'torch', 'fsdp2' or 'deepspeed'."
            )
        data = self.trainer.warm_start.data
        if data is not None and not data.is_file():
            raise ConfigError(f"trainer.warm_start.data: {data}: no such file. Correct the path.")
        if self.trainer.colocated and self.trainer.transport == "nccl":
            raise ConfigError(
                "trainer.transport: nccl connects no two processes on one GPU, and trainer.colocated puts them there. "
                "Choose ipc on one machine, or gloo or store."
            )
        trackers_config.check(self.trainer.trackers)
        self.trainer.evaluation.check()
        self.model.check()

    def _check_offline(self, offline: OfflineConfig) -> None:
        """Raise ConfigError where training on records has not what it needs, or is asked for what it has not."""
        offline.check()
        config = self.trainer
        if offline.pipeline == "distillation" and config.teacher is None:
            raise ConfigError("trainer.offline.pipeline: 'distillation' needs a teacher. Set trainer.teacher.path.")
        if offline.pipeline == "distillation" and config.backend == "megatron":
            raise ConfigError(
                "trainer.backend: 'megatron' cuts the vocabulary over ranks, and 'distillation' compares all of it. "
                "Choose 'torch', 'fsdp2' or 'deepspeed'."
            )
        unused = {
            "teacher": config.teacher is not None and offline.pipeline != "distillation",
            "critic": config.critic is not None,
            "keep_best": config.keep_best > 0,
        }
        for key, is_set in unused.items():
            if is_set:
                raise ConfigError(
                    f"trainer.{key}: training on records with the pipeline {offline.pipeline!r} has no use for it. "
                    "Remove it."
                )
