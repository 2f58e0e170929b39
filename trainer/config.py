"""Settings of the trainer layer (pydantic only: importing this must not import torch)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class CorrectionConfig(BaseModel):
    """Off-policy correction towards the sampler (`trainer/correction.py`): importance weights, rejection, veto."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    weight: Literal["none", "truncated", "masked"] = "none"
    """rho = exp(old - rollout), bounded to [low, high] (`truncated`) or replaced by 0 outside of it (`masked`)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose rho: the token's, the product over its sequence, or that product's geometric mean."""
    low: float = Field(default=0.0, ge=0)
    high: float = Field(default=2.0, gt=0)
    reject_level: Literal["token", "sequence", "geometric"] = "geometric"
    reject_low: float | None = Field(default=None, ge=0)
    reject_high: float | None = Field(default=None, gt=0)
    """Tokens whose rho at `reject_level` is outside leave loss and denominators."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """A sequence with a single token of rho below this leaves whole."""

    @property
    def rejects(self) -> bool:
        return not (self.reject_low is None and self.reject_high is None and self.veto is None)

    @property
    def is_on(self) -> bool:
        return self.weight != "none" or self.rejects

    @model_validator(mode="after")
    def _check_bounds(self) -> CorrectionConfig:
        for low, high in (("low", "high"), ("reject_low", "reject_high")):
            below, above = getattr(self, low), getattr(self, high)
            if below is not None and above is not None and below >= above:
                raise ValueError(f"algorithm.correction.{low} ({below}) must be below {high} ({above})")
        return self


class CriticConfig(BaseModel):
    """PPO's value model (`trainer/critic.py`); used with `algorithm.advantage = gae` only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    learning_rate: float = Field(default=1e-5, gt=0)
    """Constant."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """A value's loss is never smaller than that of a value at most this far from the one before the batch."""
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)


class AlgorithmConfig(BaseModel):
    """Advantages, loss and optimizer."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tasks_per_step: int = Field(default=16, ge=1)
    """P: task draws (groups) that one batch holds."""
    group_size: int = Field(default=8, ge=1)
    """G: trajectories a task draw. 1 gives advantage 0 everywhere, except with `reinforce_pp` and `gae`."""
    dynamic_sampling: bool = False
    """Draw more tasks in place of groups that teach nothing, until tasks_per_step groups do (DAPO)."""
    max_draws_factor: int = Field(default=4, ge=1)
    """With `dynamic_sampling`, a step draws at most this many times tasks_per_step; then it trains on what it has."""
    minibatches_per_step: int = Field(default=1, ge=1)
    """K: optimizer steps a batch; tasks_per_step must be divisible by it."""
    advantage: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "pass_at_k", "turn", "gae"
    ] = "grpo"
    """Of a trajectory: `grpo`: (r - mean) / (std + eps); `dr_grpo`: r - mean; `rloo`: r - mean of the others;
    `reinforce_pp`: r, normalised over the batch; `reinforce_pp_baseline`: r - mean, then so; `pass_at_k`: of success.
    Of a turn: `turn`: its return - that turn's mean. Of a token or turn: `gae`, with a critic."""
    advantage_eps: float = Field(default=1e-6, gt=0)
    """Added to a standard deviation (sample, ddof = 1)."""
    pass_k: int = Field(default=2, ge=1)
    """k of `pass_at_k`; at most group_size."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """gamma of `turn` (by turn) and `gae` (by `credit`); tool tokens never discount."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    credit: Literal["token", "turn"] = "token"
    """What an action of `gae` is."""
    critic: CriticConfig = CriticConfig()
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """The proximal policy of the ratio: the trainer's log-probs before the batch's first update, or the sampler's."""
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    """`ppo`: clipped ratio of tokens (PPO, GRPO, DAPO, Dr. GRPO); `gspo`: of sequences; `cispo`: clipped weight on the
    log-prob; `reinforce`: no ratio."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses become one; denominators in `trainer/aggregation.py`, always of the whole optimizer step."""
    norm_tokens: int | None = Field(default=None, ge=1)
    """The constant that `seq-mean-token-sum-norm` divides a sequence's sum by."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a token with advantage A < 0 by -dual_clip x A."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the estimated KL(policy || reference); 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    """`reward`: kl_coef x the estimate with the sampler's log-probs is taken off the reward, token by token where
    credit is given by token, else summed over the trajectory."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    correction: CorrectionConfig = CorrectionConfig()
    truncated: Literal["train", "mask", "penalise"] = "train"
    """What is done with trajectories that hit a limit: train on their reward, leave the loss (they stay in the
    baseline), or train with reward `truncated_reward`."""
    truncated_reward: float = 0.0
    learning_rate: float = Field(default=1e-6, gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.99, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global L2 norm."""

    @property
    def min_valid_members(self) -> int:
        """A group with fewer members that ended with a reward teaches nothing and leaves the loss."""
        return 1 if self.advantage in ("reinforce_pp", "gae") else 2

    @model_validator(mode="after")
    def _check_advantage(self) -> AlgorithmConfig:
        if self.advantage == "pass_at_k" and self.pass_k > self.group_size:
            raise ValueError(
                f"algorithm.pass_k = {self.pass_k} tries of a group of {self.group_size}: set pass_k to at most "
                f"group_size, or group_size = {self.pass_k}"
            )
        if self.dynamic_sampling and self.min_valid_members == 1:
            raise ValueError(
                f"algorithm.dynamic_sampling leaves out groups without spread, which advantage = {self.advantage} "
                "learns from: set dynamic_sampling = false"
            )
        if self.credit == "turn" and self.advantage != "gae":
            raise ValueError(
                f"algorithm.credit = turn belongs to advantage = gae, not {self.advantage}: set credit = token "
                "(advantage = turn has turns already)"
            )
        if self.kl_in == "reward" and self.kl_coef == 0:
            raise ValueError("algorithm.kl_in = reward with kl_coef = 0 does nothing: set kl_coef, or kl_in = loss")
        return self

    @model_validator(mode="after")
    def _check_loss(self) -> AlgorithmConfig:
        if self.loss == "gspo" and self.aggregation != "seq-mean-token-mean":
            raise ValueError(
                f"algorithm.loss = gspo has one ratio a sequence and needs a mean over sequences, not "
                f"{self.aggregation}: set algorithm.aggregation = seq-mean-token-mean"
            )
        if self.dual_clip is not None and self.loss != "ppo":
            raise ValueError(f"algorithm.dual_clip belongs to loss = ppo, not {self.loss}: set it to null")
        if self.loss == "reinforce" and self.minibatches_per_step > 1:
            raise ValueError(
                "algorithm.loss = reinforce has no ratio, so only the first optimizer step of a batch is right: set "
                f"algorithm.minibatches_per_step = 1 (it is {self.minibatches_per_step}), or loss = ppo"
            )
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.norm_tokens is not None):
            raise ValueError(
                "algorithm.norm_tokens is the constant of aggregation = seq-mean-token-sum-norm: give both (a good "
                f"constant is rollout.max_trajectory_tokens) or neither, not {self.norm_tokens} with {self.aggregation}"
            )
        if self.correction.is_on and self.old_logprobs == "rollout":
            raise ValueError(
                "algorithm.correction weighs the sampler against the recomputed log-probs, which old_logprobs = "
                "rollout leaves out: set algorithm.old_logprobs = recompute"
            )
        return self


class TrainerConfig(BaseModel):
    """How long, in which pieces, on how many threads."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    steps: int = Field(default=30, ge=1)
    """Batches to train on (optimizer steps = steps x minibatches_per_step)."""
    micro_batch_tokens: int = Field(default=8192, ge=64)
    """Most tokens, padding included, of one forward pass. Changes speed and memory, never the loss (C01)."""
    packing: bool = False
    """Put several samples into a row, their attention kept apart. Off by default: rows of a micro-batch have similar
    lengths, so little is padding, and attention without a mask is quicker on a CPU. Changes speed, never the loss."""
    logprob_kernel: Literal["auto", "torch", "triton"] = "auto"
    """What computes log-probs of large vocabularies in chunks; `auto`: Triton on a GPU where it is installed."""
    save_batches: bool = False
    """Keep every batch in RUN/batches, for `quintain replay-batch`; refused ones are always kept, in RUN/refused."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """torch threads; None = the cores this process may use."""
    max_staleness: Literal[0] = 0
    """Synchronous: every token is sampled by the version that is trained next."""


class ParallelismConfig(BaseModel):
    """Over how many processes the learner's work is spread, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    strategy: Literal["single", "ddp", "fsdp2"] = "single"
    """`ddp`: every process holds the whole model; `fsdp2`: weights, gradients and moments are sharded. The
    run fails where the model ends up in another wrapping."""
    num_processes: int = Field(default=1, ge=1, le=4096)
    """Processes of the learner, over all nodes; one GPU each where there are GPUs."""
    context_parallel: int = Field(default=1, ge=1)
    """Processes that share one sequence. Above 1 refused: Accelerate raises on a CPU, and it was not run on GPUs."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes that share one layer. Above 1 refused, for the same reason."""
    cpu_offload: bool = False
    """`fsdp2` on GPUs: sharded weights and moments rest in the host's memory."""
    activation_checkpointing: bool = False
    """Layers run again in the backward pass instead of keeping their activations."""
    command_timeout_s: float = Field(default=21600.0, gt=0)
    """How long the other ranks wait for rank 0's next command, while it samples. Its death ends the wait at once."""


class LoraConfig(BaseModel):
    """Low-rank adapters (arXiv 2106.09685) beside frozen weights: ``W x + (alpha / rank) B A x``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Ends of module names; `all-linear` is every linear layer but the output layer."""
    dropout: Literal[0] = 0
    """Only 0: dropout would train another policy than the one that was sampled."""


class EvalConfig(BaseModel):
    """Evaluation on held-out tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    every_steps: int = Field(default=10, ge=0)
    """Evaluate every N steps, besides before the first and after the last; 0 = only those."""
    greedy: bool = True
    """Also evaluate at temperature 0."""


class CheckpointConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    every_steps: int = Field(default=10, ge=0)
    """Save every N steps, and after the last; 0 = only after the last (and on Ctrl-C)."""
    keep: int = Field(default=2, ge=1)
    """The newest N are kept, by step *number*; older ones go only after the new one is good."""


class TrackingConfig(BaseModel):
    """What goes to Aim. JSONL in the run folder is always written and is the source of truth."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    aim: bool = True
    experiment: str | None = None
    """Aim experiment; None = the recipe's name."""
    groups_per_step: int = Field(default=1, ge=0)
    """Whole groups shown in Aim's Text explorer a step."""
    max_text_tokens: int = Field(default=2000, ge=16)
    """Tokens of one trajectory that are rendered; the rest is cut with a note."""
    trajectories_every_steps: int = Field(default=1, ge=1)


class WarmStartConfig(BaseModel):
    """Supervised warm-up of a randomly initialised model on the environment's demonstrations."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = False
    target_success: float = Field(default=0.95, gt=0, le=1)
    """Greedy success on held-out tasks that the clean stage must reach."""
    max_steps: int = Field(default=1200, ge=1)
    """Cap of the clean stage; reaching it below the target is an error."""
    check_every_steps: int = Field(default=50, ge=1)
    first_check_step: int = Field(default=100, ge=1)
    num_check_tasks: int = Field(default=128, ge=1)
    batch_size: int = Field(default=32, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak: reached after `warmup_steps`, held until a check comes near the target."""
    warmup_steps: int = Field(default=50, ge=0)
    cooldown_steps: int = Field(default=100, ge=0)
    """Then the learning rate falls to 0 over this many steps, and the check after them must reach the target."""
    num_demonstrations: int = Field(default=20000, ge=1)
    """Demonstrations drawn for the clean stage (seeded)."""
    mixed_steps: int = Field(default=0, ge=0)
    """Steps of the mixed-quality stage, which leaves RL something to do; 0 = none."""
    mixed_learning_rate: float = Field(default=1e-3, gt=0)
    mixed_bad_frac: float = Field(default=0.6, ge=0, le=1)
    """Share of bad-habit demonstrations in the mixed stage."""
    cache_dir: str = ".cache/warm_start"
    """Relative to the working directory; entries are named by the content that made them."""
