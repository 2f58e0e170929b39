"""What `LocalPolicy` samples: agreement with the model's own forward pass, streams, limits, caches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from quintain.agents.completion import Completion, GenerateRequest, RequestKey, SamplingParams
from quintain.agents.decoder_generic import GenericBackend
from quintain.agents.decoder_llama import LlamaBackend
from quintain.agents.local_policy import LocalPolicy

VOCAB = 61
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


def tiny_model(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=96, initializer_range=0.3, bos_token_id=None
        )
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "openai-gpt":
        config = transformers.OpenAIGPTConfig(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=96, initializer_range=0.3
        )
        return transformers.OpenAIGPTLMHeadModel(config).eval()
    if kind == "mamba":
        config = transformers.MambaConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.3
        )
        return transformers.MambaForCausalLM(config).eval()
    if kind == "llama-scaled":
        config = transformers.LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        )
        return transformers.LlamaForCausalLM(config).eval()
    config_class, model_class, extra = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": False}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"attention_bias": True}),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    }[kind]
    model = model_class(config_class(**SIZES, **extra)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms start at 1 and biases at 0, which would hide a wrong use
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def request(
    prompt: Sequence[int],
    *,
    member: int = 0,
    turn: int = 0,
    seed: int | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 12,
    stop: tuple[int, ...] = (7,),
) -> GenerateRequest:
    return GenerateRequest(
        key=RequestKey(draw=0, member=member, attempt=0, turn=turn),
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, stop_token_ids=stop),
        seed=100 * turn + member if seed is None else seed,
    )


def sample(policy: LocalPolicy, requests: Sequence[GenerateRequest]) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(*(policy.generate(r) for r in requests))

    return asyncio.run(run())


def forward_logprobs(model: Any, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-probs of the sampled tokens by one full forward pass of the transformers model."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *sampled]])).logits[0].float()
    picked = logits[len(prompt) - 1 : -1] / (temperature or 1.0)
    return torch.log_softmax(picked, dim=-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]


def gap(model: Any, prompt: Sequence[int], completion: Completion, temperature: float) -> float:
    reference = forward_logprobs(model, prompt, completion.token_ids, temperature)
    return float((reference - torch.tensor(completion.logprobs)).abs().max())


def uneven_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(8, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "gpt2", "llama-scaled"])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.3])
def test_every_log_prob_is_that_of_the_full_forward_pass_at_the_sampling_temperature(
    kind: str, temperature: float
) -> None:
    """C09: rows of different lengths, ending at different times, in one batch."""
    model, prompts = tiny_model(kind), uneven_prompts(24)
    policy = LocalPolicy(model)
    requests = [
        request(p, member=i, temperature=temperature, max_new_tokens=4 + 2 * i, stop=(7, 9, 11))
        for i, p in enumerate(prompts)
    ]
    completions = sample(policy, requests)
    assert max(gap(model, r.prompt_ids, c, temperature) for r, c in zip(requests, completions, strict=True)) < 5e-5
    assert len({len(c.token_ids) for c in completions}) > 3


@pytest.mark.parametrize("kind", ["openai-gpt", "mamba"])
def test_models_without_a_cache_of_keys_and_values_are_sampled_with_the_right_log_probs(kind: str) -> None:
    """C09: rows of different lengths, no padding that a recurrent state would take in."""
    model, prompts = tiny_model(kind), uneven_prompts(6)
    requests = [request(p, member=i, max_new_tokens=3 + i) for i, p in enumerate(prompts)]
    completions = sample(LocalPolicy(model), requests)
    assert max(gap(model, r.prompt_ids, c, 1.0) for r, c in zip(requests, completions, strict=True)) < 5e-5
    with pytest.raises(ValueError, match="no cache of keys and values"):
        GenericBackend(model)


def test_which_architectures_take_the_quick_path() -> None:
    quick = {kind: LlamaBackend.supports(tiny_model(kind)) for kind in ("qwen2", "qwen3", "llama", "mistral")}
    assert all(quick.values()), quick
    assert not LlamaBackend.supports(tiny_model("gpt2"))
    assert not LlamaBackend.supports(tiny_model("llama-scaled"))


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_later_turns_continue_from_the_kept_keys_with_the_same_log_probs(kind: str) -> None:
    """Three turns with slots held; tool text of different lengths, one row leaves, one row's history is replaced."""
    model, prompts = tiny_model(kind), uneven_prompts(6)
    policy = LocalPolicy(model)

    async def run() -> float:
        rows: list[list[int] | None] = [list(p) for p in prompts]
        worst = 0.0
        async with policy.slot():
            for turn in range(3):
                requests = [request(row, member=i, turn=turn) for i, row in enumerate(rows) if row is not None]
                completions = await asyncio.gather(*(policy.generate(r) for r in requests))
                for r, c in zip(requests, completions, strict=True):
                    worst = max(worst, gap(model, r.prompt_ids, c, 1.0))
                    rows[r.key.member] = [*r.prompt_ids, *c.token_ids, *range(20, 22 + r.key.member)]
                rows[2] = None
                rows[4] = [30, 31, 32, 33]
        return worst

    assert asyncio.run(run()) < 5e-5


def test_equal_prompts_with_equal_seeds_sample_equal_tokens_and_unequal_seeds_do_not() -> None:
    policy = LocalPolicy(tiny_model("qwen3"))
    same = sample(policy, [request([9, 10, 11], member=i, seed=4, stop=()) for i in range(2)])
    other = sample(policy, [request([9, 10, 11], member=i, seed=i, stop=()) for i in range(2)])
    assert same[0].token_ids == same[1].token_ids
    assert other[0].token_ids != other[1].token_ids


def test_a_rows_tokens_do_not_depend_on_the_rows_beside_it() -> None:
    """One random stream a row: the neighbours change floating-point noise at most, never the stream."""
    model, prompts = tiny_model("qwen3"), uneven_prompts(9)
    together = sample(LocalPolicy(model), [request(p, member=i) for i, p in enumerate(prompts)])
    alone = [sample(LocalPolicy(model), [request(p, member=i)])[0] for i, p in enumerate(prompts)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_frequencies_follow_the_distribution() -> None:
    model = tiny_model("llama")
    policy = LocalPolicy(model)
    count = 4000
    completions = sample(policy, [request([12, 13], member=i, max_new_tokens=1, seed=i) for i in range(count)])
    with torch.no_grad():
        probs = torch.softmax(model(input_ids=torch.tensor([[12, 13]])).logits[0, -1], dim=-1)
    seen = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=VOCAB) / count
    assert float((seen - probs).abs().max()) < 0.03


def test_greedy_takes_the_largest_logit_and_reports_its_log_prob_at_temperature_one() -> None:
    model = tiny_model("qwen3")
    completion = sample(LocalPolicy(model), [request([9, 10], temperature=0.0, stop=())])[0]
    row = [9, 10]
    for token in completion.token_ids:
        with torch.no_grad():
            assert token == int(model(input_ids=torch.tensor([row])).logits[0, -1].argmax())
        row.append(token)
    assert gap(model, [9, 10], completion, 1.0) < 5e-5


def test_a_stop_token_ends_the_completion_and_is_part_of_it() -> None:
    model = tiny_model("qwen3")
    free = sample(LocalPolicy(model), [request([9, 10], stop=())])[0]
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    cut = sample(LocalPolicy(model), [request([9, 10], stop=(free.token_ids[3],))])[0]
    first = free.token_ids.index(free.token_ids[3])
    assert cut.token_ids == free.token_ids[: first + 1] and cut.finish_reason == "stop"


def test_a_row_ends_with_length_at_the_models_context() -> None:
    prompt = [9 + i % 40 for i in range(90)]
    completion = sample(LocalPolicy(tiny_model("llama")), [request(prompt, max_new_tokens=50, stop=())])[0]
    assert len(completion.token_ids) == 6 and completion.finish_reason == "length"


def test_weights_are_shared_and_the_completion_names_the_version_that_sampled_it() -> None:
    """A changed weight counts at once; the mode of the model is restored."""
    model = tiny_model("qwen3").train()
    policy = LocalPolicy(model, policy_version=4)
    before = sample(policy, [request([9, 10], stop=())])[0]
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
    policy.set_policy_version(5)
    after = sample(policy, [request([9, 10], stop=())])[0]
    assert before.policy_versions() == (4,) * 12 and after.policy_versions() == (5,) * 12
    assert gap(model, [9, 10], after, 1.0) < 5e-5 and before.logprobs != after.logprobs
    assert model.training
