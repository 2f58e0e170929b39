"""Constructed tokens, trajectories and groups: what the policy and the environments would have made, without either."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quintain.agents.completion import Completion, VersionSpan
from quintain.agents.outcome import Outcome, StopReason
from quintain.agents.trajectory import Group, TokenRow, Trajectory, Turn
from quintain.envs.message import Message, ToolCall

_NAN = float("nan")
_CONTROL = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_PLAIN = [
    "system",
    "user",
    "assistant",
    "calculator",
    "expression",
    "arguments",
    "answer",
    "name",
    "What",
    "plus",
    "The",
]
_WORDS: list[str] = [*_CONTROL, *_PLAIN, "is", "You", "can", "use", "are", "of"]


class ToyTokens:
    """Words and bytes as tokens: ids 0–255 are bytes, the rest words. Characters beyond ASCII span several tokens."""

    def encode(self, text: str) -> tuple[int, ...]:
        ids: list[int] = []
        while text:
            word = next((w for w in sorted(_WORDS, key=len, reverse=True) if text.startswith(w)), None)
            if word is None:
                ids += text[0].encode()
                text = text[1:]
            else:
                ids.append(256 + _WORDS.index(word))
                text = text[len(word) :]
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        parts = [bytes([i]) if i < 256 else _WORDS[i - 256].encode() for i in token_ids]
        return b"".join(parts).decode("utf-8", "replace")


TOKENS = ToyTokens()


def logprobs_for(count: int, seed: int) -> tuple[float, ...]:
    """Mostly sure, sometimes surprised, the same for the same seed."""
    likely = (0.99, 0.98, 0.9, 0.97, 0.6, 0.99, 0.35, 0.999, 0.8, 0.02)
    return tuple(math.log(likely[(7 * seed + 3 * t + t * t) % len(likely)]) for t in range(count))


def trajectory(
    question: str = "What is 37 plus 48?",
    expression: str = "37+48",
    tool_result: str = "85",
    answer: str = "The answer is 85.",
    *,
    reward: float = 1.0,
    outcome: Outcome = Outcome.COMPLETED,
    versions: Sequence[int] = (3, 4),
    draw: int = 7,
    member: int = 0,
    error: str | None = None,
) -> Trajectory:
    """One call of the calculator and an answer, in ChatML, as `run_trajectory` would return it."""
    system = Message(role="system", content="You can use a calculator.")
    user = Message(role="user", content=question)
    arguments = f'{{"expression": "{expression}"}}'
    call = ToolCall(id="call_0", name="calculator", arguments=arguments)
    asks = Message(role="assistant", content="", tool_calls=(call,))
    result = Message(role="tool", content=tool_result, tool_call_id="call_0", name="calculator")
    says = Message(role="assistant", content=answer)
    call_text = f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'
    prompts = [
        f"<|im_start|>system\n{system.content}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
        f"\n<|im_start|>user\n<tool_response>\n{tool_result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ]
    replies = [call_text + "<|im_end|>", answer + "<|im_end|>"]
    turns = tuple(
        _turn(
            index, prompts[index], replies[index], (asks, says)[index], ((result,), ())[index], versions[index], member
        )
        for index in range(2)
    )
    return Trajectory(
        task_id="train-17",
        draw=draw,
        member=member,
        attempt=0,
        seed=1234,
        messages=(system, user, asks, result, says),
        turns=turns,
        rows=(row_of(turns),),
        reward=reward,
        reward_terms={} if math.isnan(reward) else {"correct": reward},
        success=reward >= 1,
        terminated=outcome is Outcome.COMPLETED,
        truncated=outcome is Outcome.TRUNCATED,
        outcome=outcome,
        stop_reason=StopReason.SANDBOX_DIED if outcome.is_failure else StopReason.TERMINATED,
        error=error,
        events={"invalid_json": 0},
    )


def group(*, draw: int = 7, size: int = 4, versions: Sequence[int] = (3, 4)) -> tuple[Group, list[float]]:
    """A group that differs in its answers, and its advantages; the last member failed for no fault of the policy."""
    members = [
        trajectory(
            answer=f"The answer is {85 + member % 2}.",
            reward=float(member % 2 == 0),
            versions=versions,
            draw=draw,
            member=member,
        )
        for member in range(size - 1)
    ]
    broken = trajectory(
        reward=_NAN, outcome=Outcome.INFRASTRUCTURE, versions=versions, draw=draw, member=size - 1, error="box died"
    )
    advantages = [0.577 if member % 2 == 0 else -1.155 for member in range(size - 1)]
    return Group(task_id="train-17", draw=draw, trajectories=(*members, broken)), [*advantages, _NAN]


def row_of(turns: Sequence[Turn]) -> TokenRow:
    """The append-only row of these turns."""
    ids: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in turns:
        count = len(turn.prompt_token_ids)
        ids += [*turn.prompt_token_ids, *turn.completion.token_ids]
        sampled += [False] * count + [True] * len(turn.completion.token_ids)
        logprobs += [_NAN] * count + list(turn.completion.logprobs)
        versions += [-1] * count + list(turn.completion.policy_versions())
    return TokenRow(
        token_ids=tuple(ids), sampled=tuple(sampled), logprobs=tuple(logprobs), policy_versions=tuple(versions)
    )


def _turn(
    index: int, prompt: str, reply: str, message: Message, observation: tuple[Message, ...], version: int, seed: int
) -> Turn:
    ids = TOKENS.encode(reply)
    completion = Completion(
        token_ids=ids,
        logprobs=logprobs_for(len(ids), seed + index),
        finish_reason="stop",
        version_spans=(VersionSpan(start=0, end=len(ids), policy_version=version),),
    )
    return Turn(
        index=index,
        prompt_token_ids=TOKENS.encode(prompt),
        completion=completion,
        message=message,
        observation=observation,
        reward=0.0,
        num_format_errors=0,
        generate_s=0.1,
        env_s=0.01,
    )
