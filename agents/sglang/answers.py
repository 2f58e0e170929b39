"""What SGLang says, read strictly: every answer is checked against what was asked before it becomes a `Completion`.

Invariants of a completion that passed: as many ids as log-probs as the server says it sampled; each log-prob stands
beside the id it belongs to; the ids are of the vocabulary; the end is one that was asked for; every token has a policy
version. Whatever does not hold is an `AnswerError`; nothing is cut, padded or guessed.

The server's `weight_version` strings are policy versions as decimal numbers; a server that was told none says
`default`, which is an error here: the version of a token is never assumed to be the current one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quintain.agents.completion import Completion, FinishReason, GenerateRequest, VersionSpan
from quintain.agents.policy import PolicyError


class EngineError(PolicyError):
    """An SGLang server failed, or cannot be reached."""


class EngineLost(EngineError):
    """The connection ended after the request was sent; something may have been sampled, so it is not sent again."""


class EngineRefused(EngineError):
    """The server understood the request and will not serve it (HTTP 4xx)."""


class EngineBusy(EngineError):
    """Nothing was sampled: no connection, or the server is not ready (HTTP 503). Worth another try."""


class AnswerError(EngineError):
    """The server's answer contradicts itself or the request."""


class RequestError(PolicyError):
    """A request that must not be sent: it would be refused, or kill the server."""


def generate_body(request: GenerateRequest, rid: str, *, stream: bool) -> dict[str, Any]:
    """The JSON body of `/generate`.

    Every sampling parameter is spelt out: a server may take what is missing from the model's generation_config, and
    top-k or a penalty there would renormalise (C10).
    """
    sampling = request.sampling
    return {
        "input_ids": list(request.prompt_ids),
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "ignore_eos": False,  # true would also ignore stop_token_ids
            "sampling_seed": request.seed % 2**31,  # without effect unless the server runs deterministically
        },
        "return_logprob": True,
        "logprob_start_len": -1,  # of what is sampled only: the prompt's would cost a pass over all of it
        "rid": rid,
        "stream": stream,
    }


def check_request(request: GenerateRequest, *, vocab_size: int, max_context_tokens: int) -> None:
    """Raises RequestError for what a server would refuse, or die of: an id beyond the vocabulary ends its process."""
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt or sampling.max_new_tokens < 1 or not 0 <= sampling.temperature < math.inf:
        raise RequestError(
            f"{request.key}: a generation needs a prompt (here {len(prompt)} tokens), max_new_tokens >= 1 (here "
            f"{sampling.max_new_tokens}) and a temperature >= 0 (here {sampling.temperature})"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise RequestError(
            f"{request.key}: token ids {min(prompt)}..{max(prompt)} in the prompt, but the model knows "
            f"0..{vocab_size - 1}; tokenizer and model do not belong together"
        )
    asked = len(prompt) + sampling.max_new_tokens
    if asked > max_context_tokens:
        raise RequestError(
            f"{request.key}: {len(prompt)} tokens of prompt and {sampling.max_new_tokens} new ones are {asked}; the "
            f"server takes {max_context_tokens}; lower rollout.max_trajectory_tokens"
        )


def parse_version(text: object, where: str) -> int:
    """The policy version in a server's `weight_version`. Raises AnswerError."""
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()):
        raise AnswerError(
            f"{where}: weight_version is {text!r}, not a policy version; set it with each weight update, or start the "
            "server with --weight-version 0"
        )
    return int(text)


def parse_completion(answer: object, request: GenerateRequest, rid: str, *, vocab_size: int) -> Completion:
    """The completion in an answer of `/generate`. Raises AnswerError, and EngineError where the server failed it."""
    where = f"{request.key} ({rid})"
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise AnswerError(f"{where}: no meta_info in the answer {str(answer)[:200]!r}")
    meta = answer["meta_info"]
    if meta.get("id") != rid:
        raise AnswerError(f"{where}: the answer belongs to request {meta.get('id')!r}")
    if meta.get("prompt_tokens") != len(request.prompt_ids):
        raise AnswerError(
            f"{where}: {len(request.prompt_ids)} tokens were sent, the server read {meta.get('prompt_tokens')!r}"
        )
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") not in ("stop", "length", "abort"):
        raise AnswerError(f"{where}: finish_reason is {reason!r}, not stop, length or abort")
    if reason["type"] == "abort" and reason.get("status_code"):
        raise EngineError(f"{where}: the server gave it up: {reason.get('message')}")
    ids, logprobs = _tokens(answer, meta, where, vocab_size=vocab_size)
    finish = _finish_reason(reason, ids, request, where)
    return Completion(
        token_ids=ids, logprobs=logprobs, finish_reason=finish, version_spans=_spans(meta, len(ids), where)
    )


def _tokens(
    answer: Mapping[str, Any], meta: Mapping[str, Any], where: str, *, vocab_size: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    ids, rows, count = answer.get("output_ids"), meta.get("output_token_logprobs"), meta.get("completion_tokens")
    if rows is None and ids == []:  # aborted before its first token
        rows = []
    if not isinstance(ids, list) or not isinstance(rows, list):
        raise AnswerError(f"{where}: output_ids or output_token_logprobs are missing")
    if not len(ids) == len(rows) == count:
        raise AnswerError(f"{where}: {len(ids)} ids, {len(rows)} log-probs and completion_tokens {count!r}")
    logprobs = []
    for index, (token, row) in enumerate(zip(ids, rows, strict=True)):
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise AnswerError(f"{where}: token {index} is {token!r}, and the model knows 0..{vocab_size - 1}")
        if not isinstance(row, list) or len(row) < 2 or row[1] != token:
            raise AnswerError(f"{where}: token {index} is {token}, its log-prob is of another: {row!r}")
        if not isinstance(row[0], float | int) or not math.isfinite(row[0]) or row[0] > 1e-3:
            raise AnswerError(f"{where}: the log-prob of token {index} is {row[0]!r}; the model diverged")
        logprobs.append(float(row[0]))
    return tuple(ids), tuple(logprobs)


def _finish_reason(
    reason: Mapping[str, Any], ids: tuple[int, ...], request: GenerateRequest, where: str
) -> FinishReason:
    kind, most = reason["type"], request.sampling.max_new_tokens
    if len(ids) > most:
        raise AnswerError(f"{where}: {len(ids)} tokens sampled, {most} asked for")
    if kind == "length" and len(ids) != most:
        raise AnswerError(f"{where}: finish_reason length after {len(ids)} of {most} tokens")
    if kind == "stop" and (not ids or reason.get("matched") != ids[-1]):
        raise AnswerError(f"{where}: stopped at {reason.get('matched')!r}, the last token is {ids[-1:]}")
    return kind


def _spans(meta: Mapping[str, Any], count: int, where: str) -> tuple[VersionSpan, ...]:
    """The server's own spans: which version sampled which token, also across an update in mid-reply."""
    rows = meta.get("weight_versions")
    if not isinstance(rows, list):
        if count == 0 and rows is None:  # nothing was sampled, so nothing has a version
            return ()
        raise AnswerError(f"{where}: no weight_versions in the answer; a token's version is never assumed (D07)")
    spans = []
    edge = 0
    for row in rows:
        start, end = (row.get("start"), row.get("end")) if isinstance(row, dict) else (None, None)
        if start != edge or not isinstance(end, int) or end < edge:
            raise AnswerError(f"{where}: weight_versions {rows} do not cover the {count} tokens one by one")
        if end > edge:
            version = parse_version(row.get("version"), where)
            spans.append(VersionSpan(start=edge, end=end, policy_version=version))
        edge = end
    if edge != count:
        raise AnswerError(f"{where}: weight_versions {rows} end at {edge}, {count} tokens were sampled")
    return tuple(spans)
