"""GRPO for a tool-using agent, the whole algorithm once: synchronous, without abstraction, on the CPU.

Read it top to bottom. The library does the same in more pieces; a test holds its loss and gradient equal to these.

    PYTHONSAFEPATH=1 python recipes/grpo_in_one_file.py --model DIR --steps 3

DIR is a Hugging Face folder with a chat template, such as `RUN/checkpoints/step_000030/model` of a run. One step:

    1. rollout      every task is tried G times: the model writes, the environment answers, until it ends the try
    2. advantage    how much better was this try than the others of the same task?
    3. loss         make the tokens of the better tries likelier, those of the worse ones less likely, but not too much
    4. update       one step of AdamW on a clipped gradient

Letters: P tasks a step, G tries a task (a group), B = P * G rows, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers

from quintain.agents.renderer import ChatRenderer
from quintain.envs import Task, ToolEnv, make_env
from quintain.envs.config import EnvironmentConfig
from quintain.sandbox import open_pool
from quintain.sandbox.config import SandboxConfig


@dataclass
class Row:
    """One try. Index t of both lists describes token t itself."""

    token_ids: list[int]
    sampled: list[bool]  # True: the model wrote it, so it is trained. False: prompt, tool result, template.
    reward: float = 0.0


# 1. Rollout ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample_replies(
    model: transformers.PreTrainedModel, prompts: Sequence[list[int]], stop_ids: Sequence[int], max_new_tokens: int
) -> list[list[int]]:
    """Continue every prompt until a stop token (which is part of the reply) or `max_new_tokens`."""
    longest = max(len(prompt) for prompt in prompts)
    pad = stop_ids[0]
    # Padded on the left, so that all prompts end in the same column and new tokens are appended to all at once.
    token_ids_BT = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    is_real_BT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    # Temperature 1 and nothing else: top-k or top-p would sample from another distribution than the one trained below.
    output_BT = model.generate(  # pyright: ignore[reportCallIssue]
        input_ids=token_ids_BT,
        attention_mask=is_real_BT,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids),
        pad_token_id=pad,
    )
    replies = []
    for new_ids in output_BT[:, longest:].tolist():
        end = next((t for t, token in enumerate(new_ids) if token in stop_ids), len(new_ids) - 1)
        replies.append(new_ids[: end + 1])
    return replies


def rollout(
    model: transformers.PreTrainedModel,
    renderer: ChatRenderer,
    envs: Sequence[ToolEnv],
    tasks: Sequence[Task],
    *,
    seed: int,
    max_new_tokens: int,
) -> list[Row]:
    """Play one conversation an environment, all in lock step: each turn is one batch of generation."""
    rows = []
    for env, task in zip(envs, tasks, strict=True):
        messages, _ = env.reset(seed=seed, options={"task": task})
        prompt = renderer.prompt_ids(messages, env.tool_specs)
        rows.append(Row(list(prompt), [False] * len(prompt)))
    playing, turn = list(range(len(rows))), 0
    while playing:
        prompts = [rows[i].token_ids for i in playing]
        replies = sample_replies(model, prompts, renderer.stop_token_ids, max_new_tokens)
        still_playing = []
        for i, reply in zip(playing, replies, strict=True):
            row, env = rows[i], envs[i]
            # The ids that were sampled are the ids that are trained on: never decode and encode again.
            row.token_ids += reply
            row.sampled += [True] * len(reply)
            if reply[-1] not in renderer.stop_token_ids:
                continue  # Cut off in mid-sentence: nothing to execute, and no reward.
            message = renderer.parse(reply, "stop", call_id_prefix=f"call_{turn}").message
            new_messages, reward, terminated, truncated, _ = env.step(message)
            row.reward += float(reward)
            if terminated or truncated:
                continue
            # Only what the template adds between this reply and the next one; it was not sampled, so it is not trained.
            delta = renderer.delta_ids(row.token_ids, message, new_messages, env.tool_specs)
            row.token_ids += delta
            row.sampled += [False] * len(delta)
            still_playing.append(i)
        playing, turn = still_playing, turn + 1
    return rows


# 2. Advantage -------------------------------------------------------------------------------------------------------


def group_advantages(rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    """``A_i = (r_i - mean(r)) / (std(r) + eps)`` over the tries of ONE task; std divides by G - 1 (2402.03300)."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)  # All the same: nothing to learn, and no rounding error may pretend otherwise.
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(r - mean) / (std + eps) for r in rewards]


# 3. Loss ------------------------------------------------------------------------------------------------------------


def token_logprobs(model: torch.nn.Module, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of every token given those before it, and which of them are trained; both `[B, T - 1]`.

    Column t is about token t + 1: the model's output at position t predicts the next token.
    """
    longest = max(len(row.token_ids) for row in rows)
    # Padded on the right: a causal model's output at a token does not depend on what comes after it.
    token_ids_BT = torch.tensor([row.token_ids + [0] * (longest - len(row.token_ids)) for row in rows])
    trained_BT = torch.tensor([row.sampled + [False] * (longest - len(row.sampled)) for row in rows])
    logits_BTV = model(input_ids=token_ids_BT, use_cache=False).logits[:, :-1].float()
    logprobs_BTV = logits_BTV.log_softmax(dim=-1)
    logprobs_BT = logprobs_BTV.gather(2, token_ids_BT[:, 1:].unsqueeze(2)).squeeze(2)
    return logprobs_BT, trained_BT[:, 1:]


def grpo_loss(
    model: torch.nn.Module,
    rows: Sequence[Row],
    advantages: Sequence[float],
    *,
    num_trained_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> torch.Tensor:
    """``sum over trained tokens of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), divided by num_trained_tokens``.

    r = exp(logprob - old logprob) is 1 here, since each batch is used for one update and the old policy is the current
    one. Its gradient is not 0: it is that of the log-prob. With several updates a batch, the old log-probs would be
    kept from before the first one, and the clip would stop tokens that have moved far enough.
    """
    logprobs_BT, trained_BT = token_logprobs(model, rows)
    logprobs = logprobs_BT[trained_BT]
    old_logprobs = logprobs.detach()
    A = torch.tensor(advantages).unsqueeze(1).expand(trained_BT.shape)[trained_BT]
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    # Divided by the trained tokens of the WHOLE step, not of these rows: pieces then add up to the same loss.
    return -torch.minimum(ratio * A, clipped * A).sum() / num_trained_tokens


# 4. Update, and the loop around everything ----------------------------------------------------------------------------


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: Sequence[Row], advantages: Sequence[float]
) -> float:
    """One update on all rows, 32 rows at a time to bound memory; returns the loss."""
    num_trained_tokens = sum(sum(row.sampled[1:]) for row in rows)
    total = 0.0
    for start in range(0, len(rows), 32):
        part = slice(start, start + 32)
        loss = grpo_loss(model, rows[part], advantages[part], num_trained_tokens=num_trained_tokens)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train and print one line a step; returns the mean rewards."""
    parser = argparse.ArgumentParser(description="GRPO on quintain/Calculator-v0, in one file")
    parser.add_argument("--model", required=True, help="Hugging Face folder of a causal LM with a chat template")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=8, help="P: tasks a step")
    parser.add_argument("--group-size", type=int, default=8, help="G: tries a task")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--max-new-tokens", type=int, default=48, help="of one reply")
    parser.add_argument("--sandbox", default="auto", choices=["auto", "docker", "local"], help="where expressions run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)

    transformers.logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    renderer = ChatRenderer(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    pool = open_pool(SandboxConfig(type=args.sandbox), needs_isolation=False, owner="grpo_in_one_file")
    try:
        config = EnvironmentConfig(id="quintain/Calculator-v0")
        envs = [make_env(config, split="train", pool=pool) for _ in range(args.tasks * args.group_size)]
        rewards = []
        for step in range(args.steps):
            first = step * args.tasks
            tasks = [envs[0].task_at((first + p) % envs[0].num_tasks) for p in range(args.tasks)]
            repeated = [task for task in tasks for _ in range(args.group_size)]
            rows = rollout(model, renderer, envs, repeated, seed=step, max_new_tokens=args.max_new_tokens)
            groups = [rows[i : i + args.group_size] for i in range(0, len(rows), args.group_size)]
            advantages = [a for group in groups for a in group_advantages([row.reward for row in group])]
            loss = train_step(model, optimizer, rows, advantages)
            rewards.append(statistics.fmean(row.reward for row in rows))
            print(f"step {step + 1:3d}  reward {rewards[-1]:.3f}  loss {loss:+.4f}", flush=True)
        return rewards
    finally:
        pool.close()


if __name__ == "__main__":
    main()
