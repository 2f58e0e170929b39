"""The config tree of one run: the root of what a recipe may say. Imports pydantic only."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from quintain.agents.config import EngineConfig, RolloutConfig
from quintain.envs.config import EnvironmentConfig
from quintain.sandbox.config import SandboxConfig
from quintain.trainer.config import (
    AlgorithmConfig,
    CheckpointConfig,
    EvalConfig,
    LoraConfig,
    ParallelismConfig,
    TrackingConfig,
    TrainerConfig,
    WarmStartConfig,
)

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


class ScratchModelConfig(BaseModel):
    """A tiny Qwen3-style model and its byte-level BPE tokenizer, made on the spot from the environment's own texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    vocab_size: int = Field(default=449, ge=300)
    """Most entries of the tokenizer; digits are always single tokens."""
    hidden_size: int = Field(default=128, ge=8)
    num_layers: int = Field(default=2, ge=1)
    num_heads: int = Field(default=4, ge=1)
    num_kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=4)
    intermediate_size: int = Field(default=384, ge=8)
    max_positions: int = Field(default=1024, ge=64)


class ModelConfig(BaseModel):
    """The policy's model: a Hugging Face folder or hub name, or a tiny one from scratch."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    path: str | None = None
    """Folder (relative to the recipe) or hub name of a causal LM with its tokenizer; None = `scratch`."""
    scratch: ScratchModelConfig = ScratchModelConfig()
    lora: LoraConfig | None = None
    """Train low-rank adapters beside the frozen model; what is sampled, saved and exported has them merged."""


class RecipeConfig(BaseModel):
    """One run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    """Names the run folder and the Aim experiment: 1 to 100 letters, digits, `.`, `_` or `-`, not starting with `.`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    environment: EnvironmentConfig
    model: ModelConfig = ModelConfig()
    sandbox: SandboxConfig = SandboxConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            shown = repr(name if len(name) <= 100 else f"{name[:100]}...")
            raise ValueError(
                f"name = {shown}: it names a folder; use 1 to 100 letters, digits, '.', '_' or '-' (not '.' first)"
            )
        return name

    @model_validator(mode="after")
    def _check_sizes(self) -> RecipeConfig:
        tasks, parts = self.algorithm.tasks_per_step, self.algorithm.minibatches_per_step
        if tasks % parts:
            raise ValueError(
                f"algorithm.tasks_per_step ({tasks} task draws) is not divisible by algorithm.minibatches_per_step "
                f"({parts}); the nearest that is: {max(parts, round(tasks / parts) * parts)}"
            )
        if self.rollout.top_p != 1.0:
            raise ValueError(
                f"rollout.top_p = {self.rollout.top_p}: training samples with a temperature only, since top-p "
                "renormalises and biases the importance ratio; set rollout.top_p = 1"
            )
        return self
