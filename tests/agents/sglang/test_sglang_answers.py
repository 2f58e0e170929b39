"""What of a server's answers is taken, and what is never sent. The answers have the form of SGLang 0.5.23."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quintain.agents.completion import GenerateRequest, RequestKey, SamplingParams, VersionSpan
from quintain.agents.sglang.answers import (
    AnswerError,
    EngineError,
    RequestError,
    check_request,
    generate_body,
    parse_completion,
)
from quintain.agents.sglang.client import KNOWN_BAD, check_version
from quintain.agents.sglang.policy import SGLangPolicy

RID = "r."
REQUEST = GenerateRequest(
    key=RequestKey(draw=1, member=2, attempt=0, turn=0),
    prompt_ids=(10, 20, 30, 40),
    sampling=SamplingParams(max_new_tokens=3, temperature=0.7, stop_token_ids=(5,)),
    seed=2**52,
)
ANSWER: dict[str, Any] = {
    "output_ids": [306, 313, 281],
    "meta_info": {
        "id": RID,
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 4,
        "weight_version": "9",
        "output_token_logprobs": [[-5.2, 306, None], [-7.7, 313, None], [-6.3, 281, None]],
        "completion_tokens": 3,
        "weight_versions": [{"version": "8", "start": 0, "end": 1}, {"version": "9", "start": 1, "end": 3}],
    },
}


def parse(answer: object = ANSWER) -> Any:
    return parse_completion(answer, REQUEST, RID, vocab_size=465)


def changed(**meta: Any) -> dict[str, Any]:
    answer = copy.deepcopy(ANSWER)
    answer["meta_info"] |= {key: value for key, value in meta.items() if value is not ...}
    for key in [key for key, value in meta.items() if value is ...]:
        del answer["meta_info"][key]
    return answer


def test_an_answer_becomes_a_completion_with_the_server_s_own_version_spans():
    done = parse()
    assert done.token_ids == (306, 313, 281) and done.logprobs == (-5.2, -7.7, -6.3)
    assert done.finish_reason == "length"
    assert done.version_spans == (
        VersionSpan(start=0, end=1, policy_version=8),
        VersionSpan(start=1, end=3, policy_version=9),
    )


@pytest.mark.parametrize(
    "meta",
    [
        {"weight_versions": ...},  # D07
        {"weight_versions": None},
        {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},
        {"weight_versions": [{"version": 9, "start": 0, "end": 3}]},
        {"weight_versions": [{"version": "9", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "9", "start": 0, "end": 4}]},
        {"weight_versions": [{"version": "9", "start": 1, "end": 3}]},
        {"weight_versions": [{"start": 0, "end": 3}]},
        {"completion_tokens": 2},
        {"completion_tokens": ...},
        {"output_token_logprobs": [[-5.2, 306, None], [-7.7, 313, None]]},
        {"output_token_logprobs": [[-5.2, 306, None], [-7.7, 281, None], [-6.3, 313, None]]},
        {"output_token_logprobs": [[-5.2, 306, None], [None, 313, None], [-6.3, 281, None]]},
        {"output_token_logprobs": [[-5.2, 306, None], [float("nan"), 313, None], [-6.3, 281, None]]},
        {"output_token_logprobs": ...},
        {"finish_reason": None},
        {"finish_reason": {"type": "stop", "matched": 5}},  # the last token is another
        {"finish_reason": {"type": "stop", "matched": "text"}},
        {"finish_reason": {"type": "eos"}},
        {"id": "other."},
        {"prompt_tokens": 5},
    ],
)
def test_an_answer_that_contradicts_itself_or_the_request_is_refused(meta: dict[str, Any]):
    """D07 and the lengths: nothing is zipped, nothing is taken for the current version."""
    with pytest.raises(AnswerError, match=r"draw=1, member=2"):
        parse(changed(**meta))


@pytest.mark.parametrize("answer", [None, [], {}, {"meta_info": None}, "text", {**ANSWER, "output_ids": [306, 313]}])
def test_what_is_no_answer_is_refused(answer: object):
    with pytest.raises(AnswerError):
        parse(answer)


def test_an_id_beyond_the_vocabulary_in_an_answer_is_refused():
    with pytest.raises(AnswerError, match=r"knows 0\.\.299"):
        parse_completion(ANSWER, REQUEST, RID, vocab_size=300)


def test_a_cut_keeps_its_finish_reason_and_an_abort_keeps_what_was_sampled():
    """B10"""
    assert parse().finish_reason == "length"
    aborted = parse(changed(finish_reason={"type": "abort", "message": "Aborted"}))
    assert aborted.finish_reason == "abort" and len(aborted.token_ids) == 3
    with pytest.raises(EngineError, match="out of memory"):
        parse(changed(finish_reason={"type": "abort", "message": "out of memory", "status_code": 500}))


@pytest.mark.parametrize(
    ("prompt", "sampling", "problem"),
    [
        ((), {}, "needs a prompt"),
        ((1, 465), {}, r"knows 0\.\.464"),  # would end the server
        ((-1,), {}, r"knows 0\.\.464"),
        ((1,), {"max_new_tokens": 0}, "max_new_tokens >= 1"),
        ((1,), {"temperature": float("nan")}, "temperature"),
        ((1,) * 60, {"max_new_tokens": 16}, "76, and|are 76"),  # A17
    ],
)
def test_a_request_that_would_be_refused_or_kill_the_server_is_not_sent(prompt: Any, sampling: Any, problem: str):
    request = GenerateRequest(key=REQUEST.key, prompt_ids=prompt, sampling=SamplingParams(**sampling), seed=0)
    with pytest.raises(RequestError, match=problem):
        check_request(request, vocab_size=465, max_context_tokens=64)


def test_a_request_that_ends_exactly_at_the_limit_is_sent():
    """A17"""
    sampling = SamplingParams(max_new_tokens=4)
    request = GenerateRequest(key=REQUEST.key, prompt_ids=(1,) * 60, sampling=sampling, seed=0)
    check_request(request, vocab_size=465, max_context_tokens=64)


def test_every_sampling_parameter_travels_with_the_request():
    """C10: what is left out, a server may take from the model's generation_config."""
    body = generate_body(REQUEST, RID, stream=False)
    sampling = body["sampling_params"]
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"], sampling["repetition_penalty"]) == (1, -1, 0, 1)
    assert (sampling["temperature"], sampling["stop_token_ids"], sampling["ignore_eos"]) == (0.7, [5], False)
    assert body["input_ids"] == [10, 20, 30, 40] and body["logprob_start_len"] == -1


def test_no_request_id_is_the_start_of_another():
    """A server ends every request whose id starts with the one given."""
    policy = SGLangPolicy(["http://127.0.0.1:1"], vocab_size=10)
    keys = [
        RequestKey(draw=d, member=m, attempt=a, turn=t)
        for d in (1, 12)
        for m in (1, 11)
        for a in (0, 1)
        for t in (1, 10)
    ]
    rids = [policy.next_rid(key) for key in keys * 12]
    assert not any(a != b and b.startswith(a) for a in rids for b in rids) and len(set(rids)) == len(rids)


@pytest.mark.parametrize("version", [*KNOWN_BAD, "0.4.9.post6", "0.5.15.post1"])
def test_versions_known_not_to_work_are_refused_with_the_reason(version: str):
    with pytest.raises(EngineError, match=f"SGLang {version} does not work here: .*install sglang>=0.5.23"):
        check_version(version)


def test_a_newer_version_is_taken_with_a_notice():
    assert check_version("0.5.23") is None
    assert "newer than the newest that was tried" in (check_version("0.6.0") or "")
