"""A trajectory as a plain transcript: what Aim's text search and a terminal show."""

from __future__ import annotations

import math

from quintain.agents.trajectory import Trajectory
from quintain.envs.message import Message

_CHARACTERS_PER_TOKEN = 8


def trajectory_text(trajectory: Trajectory, *, advantage: float, policy_version: int, max_tokens: int) -> str:
    """Header line, then one block a message. Cut to about `max_tokens` (8 characters each) with a note."""
    lines = [header(trajectory, advantage=advantage, policy_version=policy_version)]
    if trajectory.error:
        lines.append(f"error: {trajectory.error}")
    for message in trajectory.messages:
        lines += ["", f"[{message_title(message)}]", message_text(message)]
    text = encodable("\n".join(lines))
    most = max_tokens * _CHARACTERS_PER_TOKEN
    return text if len(text) <= most else f"{text[:most]}\n… {len(text) - most} characters more"


def encodable(text: str) -> str:
    """Without lone surrogates, which a model can write as JSON escapes and which have no UTF-8 form."""
    return text.encode("utf-8", "replace").decode("utf-8")


def header(trajectory: Trajectory, *, advantage: float, policy_version: int) -> str:
    """`key=value` pairs, for regular expressions."""
    pairs = {
        "task": trajectory.task_id,
        "draw": trajectory.draw,
        "member": trajectory.member,
        "reward": number(trajectory.reward),
        "advantage": number(advantage, signed=True),
        "success": str(trajectory.success).lower(),
        "outcome": trajectory.outcome.value,
        "stop": trajectory.stop_reason.value,
        "staleness": staleness(trajectory, policy_version),
        "sampled_tokens": trajectory.num_sampled_tokens,
        "turns": len(trajectory.turns),
    }
    return " ".join(f"{key}={value}" for key, value in pairs.items())


def message_title(message: Message) -> str:
    return f"{message.role} {message.name}" if message.name else message.role


def message_text(message: Message) -> str:
    """Reasoning, content and tool calls of one message."""
    parts = [f"(reasoning) {message.reasoning}"] if message.reasoning else []
    if message.content or not (message.tool_calls or message.reasoning):
        parts.append(message.content)
    parts += [f"-> {call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(parts)


def number(value: float, *, signed: bool = False) -> str:
    """Three digits; a missing value is `none`."""
    if math.isnan(value):
        return "none"
    return f"{value:+.3f}" if signed else f"{value:.3f}"


def staleness(trajectory: Trajectory, policy_version: int) -> str:
    """The learner's version minus the oldest that sampled a token; `none` where nothing was sampled."""
    oldest = trajectory.oldest_policy_version
    return "none" if oldest is None else str(policy_version - oldest)
