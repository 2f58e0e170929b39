"""Small models, samples and groups for the trainer's tests."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers

from quintain.agents.completion import Completion, VersionSpan
from quintain.agents.outcome import Outcome, StopReason
from quintain.agents.trajectory import Group, TokenRow, Trajectory, Turn
from quintain.envs.message import Message
from quintain.trainer.sample import Sample

VOCAB = 61
NAN = math.nan
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_model(kind: str = "qwen3", *, seed: int = 3, dropout: float = 0.0) -> Any:
    """A randomly initialised causal LM of a few thousand parameters, sharp enough that its tokens differ."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=96,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "gemma2":  # caps its logits behind the output layer, and slides its attention window
        config = transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=5.0, sliding_window=8)
        return transformers.Gemma2ForCausalLM(config)
    if kind == "opt":  # takes its positions from the attention mask
        config = transformers.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            ffn_dim=48,
            num_attention_heads=4,
            max_position_embeddings=96,
            word_embed_proj_dim=32,
            init_std=0.3,
            dropout=0.0,
        )
        return transformers.OPTForCausalLM(config)
    config_class, model_class, extra = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    }[kind]
    return model_class(config_class(**SIZES, **extra))


def make_sample(
    length: int,
    trained: Sequence[int],
    *,
    advantage: float = 1.0,
    draw: int = 0,
    member: int = 0,
    rollout_logprob: float = -1.0,
    version: int = 0,
    placeholder: float = NAN,
    seed: int = 0,
) -> Sample:
    """A row of random ids with the tokens at `trained` trained; `placeholder` stands where there is no log-prob."""
    rng = random.Random(f"{seed}/{draw}/{member}/{length}")
    mask = [t in trained for t in range(length)]
    return Sample(
        token_ids=tuple(rng.randrange(VOCAB) for _ in mask),
        loss_mask=tuple(mask),
        rollout_logprobs=tuple(rollout_logprob if m else placeholder for m in mask),
        advantages=tuple(advantage if m else placeholder for m in mask),
        policy_versions=tuple(version if m else -1 for m in mask),
        draw=draw,
        member=member,
    )


def mixed_samples(
    *,
    num_draws: int = 4,
    group_size: int = 3,
    seed: int = 0,
    rollout_near: Any = None,
    rollout_shift: float = 0.2,
) -> list[Sample]:
    """Rows of many lengths, with two trained spans each and a hole (tool text) between them.

    With `rollout_near`, the sampler's log-probs are that model's, shifted by a random number up to `rollout_shift`, or
    by exactly that much where it is 5 nats or more.
    """
    rng = random.Random(seed)
    samples = []
    for draw in range(num_draws):
        for member in range(group_size):
            length = rng.randint(9, 30)
            trained = [*range(3, 5), *range(7, length)]
            advantage = rng.choice([1.0, -1.0, 0.5])
            samples.append(make_sample(length, trained, advantage=advantage, draw=draw, member=member, seed=seed))
    if rollout_near is not None:
        samples = [_sampled_near(rollout_near, sample, rollout_shift, rng) for sample in samples]
    return samples


def _sampled_near(model: Any, sample: Sample, shift: float, rng: random.Random) -> Sample:
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([sample.token_ids])).logits[0].log_softmax(dim=-1)
    logprobs = [NAN, *(logits_TV[t - 1, token].item() for t, token in enumerate(sample.token_ids) if t)]
    moved = [lp - (shift if shift >= 5 else rng.uniform(-shift, shift)) for lp in logprobs]
    return replace(sample, rollout_logprobs=tuple(moved))


def make_trajectory(
    reward: float = 1.0,
    *,
    draw: int = 0,
    member: int = 0,
    outcome: Outcome = Outcome.COMPLETED,
    num_rows: int = 1,
    num_sampled: int = 3,
    version: int = 0,
    success: bool | None = None,
    num_format_errors: int = 0,
    attempt: int = 0,
) -> Trajectory:
    """One turn of `num_sampled` tokens behind a prompt of two, in `num_rows` equal rows."""
    ids = tuple(range(10, 10 + num_sampled))
    row = TokenRow(
        token_ids=(1, 2, *ids),
        sampled=(False, False, *([True] * num_sampled)),
        logprobs=(NAN, NAN, *([-0.5] * num_sampled)),
        policy_versions=(-1, -1, *([version] * num_sampled)),
    )
    completion = Completion(
        token_ids=ids,
        logprobs=(-0.5,) * num_sampled,
        finish_reason="stop",
        version_spans=(VersionSpan(start=0, end=num_sampled, policy_version=version),),
    )
    turn = Turn(
        index=0,
        prompt_token_ids=(1, 2),
        completion=completion,
        message=Message(role="assistant", content="x"),
        observation=(),
        reward=reward,
        num_format_errors=num_format_errors,
        generate_s=0.0,
        env_s=0.0,
    )
    return Trajectory(
        task_id=f"task-{draw}",
        draw=draw,
        member=member,
        attempt=attempt,
        seed=draw,
        messages=(),
        turns=(turn,),
        rows=(row,) * num_rows,
        reward=NAN if outcome.is_failure or outcome is Outcome.CANCELLED else reward,
        reward_terms={},
        success=reward >= 1 if success is None else success,
        terminated=outcome is Outcome.COMPLETED,
        truncated=outcome is Outcome.TRUNCATED,
        outcome=outcome,
        stop_reason=StopReason.TERMINATED,
    )


def make_group(*trajectories: Trajectory, draw: int = 0) -> Group:
    return Group(task_id=f"task-{draw}", draw=draw, trajectories=trajectories)


def group_of(rewards: Sequence[float | None], *, draw: int = 0) -> Group:
    """Members with these rewards; None = its sandbox died."""
    members = [
        make_trajectory(
            NAN if reward is None else reward,
            draw=draw,
            member=member,
            outcome=Outcome.INFRASTRUCTURE if reward is None else Outcome.COMPLETED,
        )
        for member, reward in enumerate(rewards)
    ]
    return make_group(*members, draw=draw)


def turns_trajectory(
    rewards: Sequence[float],
    *,
    draw: int = 0,
    member: int = 0,
    tokens_per_turn: int = 2,
    rollout_logprob: float = -0.5,
    forked: bool = False,
    **changes: Any,
) -> Trajectory:
    """One turn a reward, each of `tokens_per_turn` tokens behind a prompt or a tool answer of two tokens.

    In one row, or (`forked`) with a row of its own for every turn.
    """
    base = make_trajectory(sum(rewards), draw=draw, member=member, num_sampled=tokens_per_turn)
    turns, rows = [], []
    ids: list[int] = []
    sampled: list[bool] = []
    for index, reward in enumerate(rewards):
        completion = replace(base.turns[0].completion, logprobs=(rollout_logprob,) * tokens_per_turn)
        turns.append(replace(base.turns[0], index=index, reward=reward, completion=completion))
        ids = [*ids, 1, 2, *completion.token_ids]
        sampled = [*([False] * len(sampled) if forked else sampled), False, False, *[True] * tokens_per_turn]
        if forked or index == len(rewards) - 1:
            rows.append(
                TokenRow(
                    token_ids=tuple(ids),
                    sampled=tuple(sampled),
                    logprobs=tuple(rollout_logprob if s else NAN for s in sampled),
                    policy_versions=tuple(0 if s else -1 for s in sampled),
                )
            )
    return replace(base, turns=tuple(turns), rows=tuple(rows), **changes)
