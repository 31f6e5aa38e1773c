"""Everything else that `generate` promises: where it stops, what it streams, what it returns, what it leaves behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import tokenizers
import torch
from conftest import SHAPES, around, build, prompt, run, target
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_treespec
from hf_treespec import Budget, Commit, DraftContext, Drafter, ScriptedDrafter, TokenTree, _compat, stream

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


# -------------------------------------------------------------------- stopping


@pytest.mark.parametrize("shape", ["chain", "truth_last"])
def test_eos_anywhere_in_an_accepted_path_ends_where_plain_ends(llama: PreTrainedModel, shape: str) -> None:
    """Nothing later is returned or streamed, and the returned cache is one token short of the text."""
    text = llama.generate(prompt(), **GREEDY)
    for place in range(12, text.shape[1]):
        eos = [int(text[0, place]), 60]
        recorder = Recorder()
        cache = DynamicCache(config=llama.config)
        arguments = {**GREEDY, "eos_token_id": eos}
        expected = llama.generate(prompt(), **arguments)
        ours = run(
            llama, prompt(), around(text, shape), streamer=recorder, **{_compat.cache_key(llama): cache}, **arguments
        )
        assert torch.equal(ours, expected)
        assert recorder.puts == [prompt()[0].tolist(), *([t] for t in expected[0, 12:].tolist())]
        assert recorder.ended == 1
        assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", range(1, 7))
def test_max_new_tokens_is_exact(llama: PreTrainedModel, count: int, shape: str) -> None:
    text = llama.generate(prompt(), **GREEDY)
    ours = run(llama, prompt(), around(text, shape), do_sample=False, max_new_tokens=count)
    assert torch.equal(ours, text[:, : 12 + count])
    assert torch.equal(run(llama, prompt(), around(text, shape), do_sample=False, max_length=12 + count), ours)


def letters() -> PreTrainedTokenizerFast:
    """Token i is written chr(65 + i)."""
    vocab = {chr(65 + i): i for i in range(61)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_stop_strings_at_any_place(llama: PreTrainedModel) -> None:
    text = llama.generate(prompt(), **GREEDY)
    tokenizer = letters()
    written = tokenizer.decode(text[0])
    assert len(written) == text.shape[1]
    for place in range(13, len(written) - 1):
        arguments = {**GREEDY, "stop_strings": [written[place : place + 2]], "tokenizer": tokenizer}
        expected = llama.generate(prompt(), **arguments)
        assert expected.shape[1] <= place + 2
        assert torch.equal(run(llama, prompt(), around(text, "truth_last"), **arguments), expected)


def test_user_criteria_see_every_token_once_and_in_order(llama: PreTrainedModel) -> None:
    class Counting(StoppingCriteria):
        def __init__(self) -> None:
            self.seen: list[tuple[list[int], int]] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.seen.append((input_ids[0].tolist(), len(scores)))
            return torch.tensor([len(self.seen) == 7])

    text = llama.generate(prompt(), **GREEDY)
    common = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    plain, ours = Counting(), Counting()
    expected = llama.generate(prompt(), stopping_criteria=StoppingCriteriaList([plain]), **common)
    result = run(llama, prompt(), around(text, "chain"), stopping_criteria=StoppingCriteriaList([ours]), **common)
    assert torch.equal(result.sequences, expected.sequences)
    assert ours.seen == plain.seen
    assert len(ours.seen) == 7


def test_max_time_is_checked_for_each_token(llama: PreTrainedModel) -> None:
    class Slow(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            time.sleep(0.05)
            return torch.tensor([False])

    text = llama.generate(prompt(), **GREEDY)
    slow = StoppingCriteriaList([Slow()])
    ours = run(llama, prompt(), around(text, "chain"), max_time=0.12, stopping_criteria=slow, **GREEDY)
    assert 14 <= ours.shape[1] <= 16  # the first round after the prompt's would commit 5, to 18


# -------------------------------------------------------------------- outputs


def _assert_same(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, tuple):
        assert isinstance(ours, tuple) and len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            _assert_same(one, other, f"{where}[{i}]")
    elif theirs is None:
        assert ours is None, where
    else:
        assert ours.shape == theirs.shape, f"{where}: {tuple(ours.shape)} is not {tuple(theirs.shape)}"
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, msg=lambda m: f"{where}: {m}")


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_returned_outputs_are_those_of_plain_decoding(family: str, attention: str) -> None:
    model = target(family, attention)
    common = {
        **GREEDY,
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": attention == "eager",
    }
    expected = model.generate(prompt(), **common)
    ours = run(model, prompt(), around(expected.sequences, "truth_last"), **common)
    assert type(ours) is type(expected)
    assert list(ours.keys()) == list(expected.keys())
    assert ours.tree_spec.tokens_per_round > 2
    for name in ("sequences", "scores", "logits", "hidden_states", "attentions"):
        _assert_same(getattr(ours, name), getattr(expected, name), name)
    key = next(k for k in ours if k in ("cache", "past_key_values"))
    for one, other in zip(ours[key].layers, expected[key].layers, strict=True):
        assert type(one) is type(other)
        assert one.get_seq_length() == other.get_seq_length()
        _assert_same((one.keys, one.values), (other.keys, other.values), "cache")


def test_asking_for_little_gives_little(llama: PreTrainedModel) -> None:
    ours = run(llama, prompt(), return_dict_in_generate=True, **GREEDY)
    assert ours.scores is None and ours.logits is None and ours.hidden_states is None and ours.attentions is None
    assert ours.tree_spec.committed == 20


# -------------------------------------------------------------------- prompts


def _plain_or_skip(plain: Any) -> Any:
    """What plain `generate` gives, in releases of transformers where it works at all."""
    try:
        return plain()
    except (IndexError, ValueError) as error:
        pytest.skip(f"this release of transformers cannot do it plainly either: {error}")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("only_new", [False, True])
def test_a_second_turn_on_the_users_cache(family: str, only_new: bool) -> None:
    """The caller's cache object is continued, and holds after each turn what plain decoding would leave in it."""
    model = target(family)
    key = _compat.cache_key(model)

    def turns(**spec: Any) -> tuple[torch.Tensor, DynamicCache]:
        cache = DynamicCache(config=model.config)
        first = model.generate(prompt(), **{key: cache}, **GREEDY, **spec)
        ids = torch.cat([first, prompt(5, seed=9)], 1)
        mask = torch.ones_like(ids)
        if only_new:
            ids = ids[:, cache.get_seq_length() :]
        return model.generate(ids, attention_mask=mask, **{key: cache}, **GREEDY, **spec), cache

    expected, theirs = _plain_or_skip(turns)
    text, ours = turns(tree_spec={"debug": True})
    assert torch.equal(text, expected)
    assert ours.get_seq_length() == theirs.get_seq_length()
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert type(one) is type(other)
        _assert_same((one.keys, one.values), (other.keys, other.values), "cache")


def test_left_padding(llama: PreTrainedModel) -> None:
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt(9)], 1)
    mask = (torch.arange(13) >= 4).long()[None]
    expected = llama.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(llama.generate(prompt(9), **GREEDY), expected[:, 4:])
    for drafter in ("ngram", around(expected, "truth_last")):
        assert torch.equal(run(llama, ids, drafter, attention_mask=mask, **GREEDY), expected)
    ours = run(llama, ids, "model", attention_mask=mask, assistant_model=llama, **GREEDY)
    assert torch.equal(ours, expected)
    assert ours.tree_spec.tokens_per_round > 3  # the assistant read the same text, not the padding


def test_embedded_prompts(llama: PreTrainedModel) -> None:
    embeds = llama.get_input_embeddings()(prompt())
    expected = llama.generate(inputs_embeds=embeds, **GREEDY)
    drafter = around(torch.cat([prompt(), expected], 1)[:, 12:], "chain")
    assert torch.equal(llama.generate(inputs_embeds=embeds, tree_spec=True, **GREEDY), expected)
    assert torch.equal(llama.generate(inputs_embeds=embeds, tree_spec=drafter, **GREEDY), expected)
    both = llama.generate(prompt(), inputs_embeds=embeds, tree_spec=True, **GREEDY)
    assert torch.equal(both, llama.generate(prompt(), inputs_embeds=embeds, **GREEDY))


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_prefill_in_chunks(chunk: int) -> None:
    model = target("gemma3")
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda m, a, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        expected = _plain_or_skip(lambda: model.generate(prompt(), prefill_chunk_size=chunk, **GREEDY))
        plain_sizes, sizes[:] = list(sizes), []
        text = run(model, prompt(), prefill_chunk_size=chunk, **GREEDY)
    finally:
        handle.remove()
    assert torch.equal(text, expected)
    prefills = -(-12 // chunk)
    assert sizes[:prefills] == plain_sizes[:prefills]


def test_a_prompt_of_one_token(llama: PreTrainedModel) -> None:
    expected = llama.generate(prompt(1), **GREEDY)
    assert torch.equal(run(llama, prompt(1), **GREEDY), expected)
    assert torch.equal(run(llama, prompt(1), "model", assistant_model=llama, **GREEDY), expected)


def test_token_types_are_continued() -> None:
    model = target("gpt2")
    types = torch.tensor([[3] * 6 + [5] * 6])
    expected = model.generate(prompt(), token_type_ids=types, **GREEDY)
    assert not torch.equal(expected, model.generate(prompt(), **GREEDY))
    assert torch.equal(run(model, prompt(), around(expected, "truth_last"), token_type_ids=types, **GREEDY), expected)


def test_rotary_frequencies_that_change_with_length() -> None:
    """Trees stop before the position at which "dynamic" frequencies would change for the whole round."""
    from conftest import LLAMA
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    arguments = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}

    def fresh() -> PreTrainedModel:  # such a model keeps its frequencies from call to call in some releases
        torch.manual_seed(0)
        config = LlamaConfig(**{**LLAMA, "max_position_embeddings": 24, "rope_parameters": rope})
        return LlamaForCausalLM(config).eval()

    expected = fresh().generate(prompt(), **arguments)
    ours = fresh().generate(prompt(), tree_spec=around(expected, "chain"), **arguments)
    assert torch.equal(ours, expected)
    assert ours.tree_spec.drafted > 0


# -------------------------------------------------------------------- what is left behind


class _Boom(Exception):
    pass


def _explode(*args: Any) -> Any:
    raise _Boom


@pytest.mark.parametrize("where", ["draft", "start", "observe", "read_prompt", "processor", "criterion", "streamer"])
def test_an_exception_leaves_everything_usable(where: str) -> None:
    model = build("llama")
    expected = model.generate(prompt(), **GREEDY)
    cache = DynamicCache(config=model.config)
    drafter: Any = around(expected, "truth_last")
    arguments: dict[str, Any] = {"streamer": Recorder()}
    config_before = model.config.to_json_string(), model.generation_config.to_json_string()

    def after_two_rounds(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 7:
            raise _Boom
        return args[1] if len(args) > 1 else torch.tensor([False])

    calls: list[int] = []
    if where in ("draft", "start", "observe", "read_prompt"):
        methods = {"draft": lambda self, c, b: TokenTree.root_only(c.last_token), where: _explode}
        drafter = type("Bad", (Drafter,), methods)()
    elif where == "processor":
        arguments["logits_processor"] = [after_two_rounds]
    elif where == "criterion":
        arguments["stopping_criteria"] = [lambda ids, scores, **k: after_two_rounds(ids)]
    else:
        arguments["streamer"].put = lambda value: after_two_rounds(value)
    with pytest.raises(_Boom):
        run(model, prompt(), drafter, **{_compat.cache_key(model): cache}, **arguments, **GREEDY)
    assert arguments["streamer"].ended == 1
    assert model.config._attn_implementation == "sdpa"
    assert (model.config.to_json_string(), model.generation_config.to_json_string()) == config_before
    # the cache is the text's, one token short, as far as it went
    held = cache.get_seq_length()
    fresh = DynamicCache()
    with torch.no_grad():
        model(input_ids=expected[:, :held], use_cache=True, **{_compat.cache_key(model): fresh})
    _assert_same(cache.layers[1].keys, fresh.layers[1].keys, "cache after the exception")
    torch.manual_seed(0)
    sampled = model.generate(prompt(), do_sample=True, max_new_tokens=8)
    torch.manual_seed(0)
    assert torch.equal(run(model, prompt(), do_sample=True, max_new_tokens=8), sampled)
    assert torch.equal(run(model, prompt(), **GREEDY), expected)


def test_calls_do_not_meet() -> None:
    """A, B, A through one drafter object give the texts of each alone."""
    model = target("llama")
    prompts = [prompt(seed=1), prompt(15, seed=2), prompt(seed=1)]
    for drafter in (hf_treespec.NgramDrafter(), hf_treespec.ModelDrafter(model)):
        for ids in prompts:
            assert torch.equal(run(model, ids, drafter, **GREEDY), model.generate(ids, **GREEDY))


@pytest.mark.parametrize("name", ["ngram", "model"])
def test_four_threads_on_one_model(llama: PreTrainedModel, name: str) -> None:
    prompts = [prompt(8 + i, seed=i) for i in range(4)]
    alone = [llama.generate(ids, **GREEDY) for ids in prompts]
    drafter = hf_treespec.NgramDrafter() if name == "ngram" else hf_treespec.ModelDrafter(llama)
    failures: list[Any] = []

    def work(i: int) -> None:
        try:
            for _ in range(5):
                text = run(llama, prompts[i], drafter, **GREEDY)
                assert torch.equal(text, alone[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert llama.config._attn_implementation == "sdpa"


# -------------------------------------------------------------------- streaming rounds


def test_stream_gives_the_rounds_and_the_result(llama: PreTrainedModel) -> None:
    text = llama.generate(prompt(), **GREEDY)
    rounds = stream(llama, inputs=prompt(), tree_spec=around(text, "truth_last"), **GREEDY)
    records = list(rounds)
    assert [r.index for r in records] == list(range(len(records)))
    assert [t for r in records for t in r.committed] == text[0, 12:].tolist()
    assert torch.equal(rounds.result, text)
    for r in records:
        assert r.path[0] == 0 and len(r.path) == len(r.committed)
        accepted = [int(t) for t in r.tokens[r.path[1:]]]
        assert r.committed[: len(accepted)] == accepted
        assert set(r.seconds) == {"draft", "verify", "host"}
    stats = rounds.stats
    assert stats.committed == 20
    assert stats.rounds == len(records) - 1
    assert stats.accepted == sum(r.accepted for r in records)
    assert stats.tokens_per_round == pytest.approx(19 / stats.rounds)
    assert stats.to_dict(rounds=True)["records"][1]["tokens"] == records[1].tokens.tolist()


def test_a_stream_may_be_closed_early(llama: PreTrainedModel) -> None:
    recorder = Recorder()
    cache = DynamicCache(config=llama.config)
    arguments = {"streamer": recorder, _compat.cache_key(llama): cache, **GREEDY}
    rounds = stream(llama, inputs=prompt(), **arguments)
    committed = next(rounds).committed + next(rounds).committed
    assert torch.is_grad_enabled()  # nothing of the loop leaks between rounds
    rounds.close()
    assert rounds.result is None
    assert recorder.ended == 1
    assert llama.config._attn_implementation == "sdpa"
    assert cache.get_seq_length() == 12 + len(committed) - 1


def test_stream_refuses_before_the_first_round(llama: PreTrainedModel) -> None:
    with pytest.raises(hf_treespec.UnsupportedArgumentError, match="num_beams=2"):
        stream(llama, inputs=prompt(), num_beams=2, **GREEDY)


def test_drafters_see_the_logits_of_rejected_nodes_too(llama: PreTrainedModel) -> None:
    from hf_treespec.reference import path_logits

    text = llama.generate(prompt(), **GREEDY)
    drafter = around(text, "truth_last")
    run(llama, prompt(), drafter, **GREEDY)
    assert len(drafter.commits) > 2
    done = 12
    for commit in drafter.commits:
        expected = path_logits(llama, text[:, :done], commit.verified.tree)
        torch.testing.assert_close(commit.verified.logits[0], expected, atol=1e-4, rtol=0)
        done += len(commit.tokens[0])


def test_hidden_states_reach_drafters_that_ask(llama: PreTrainedModel) -> None:
    class Asking(ScriptedDrafter):
        hidden_layers = (1,)

    text = llama.generate(prompt(), **GREEDY)
    drafter = Asking(around(text, "chain").script)
    ours = run(llama, prompt(), drafter, **GREEDY)
    assert torch.equal(ours, text)
    for commit in drafter.commits[1:]:
        assert commit.verified.hidden_states is not None
        assert commit.verified.hidden_states[1].shape == (1, len(commit.verified.tree), 32)
    first = drafter.commits[0].verified.hidden_states
    assert first is not None and first[1].shape == (1, 12, 32)  # the whole prompt's


def test_the_prompt_is_read_before_the_first_draft_and_only_then(llama: PreTrainedModel, plain_until: Any) -> None:
    """A call in which nothing is drafted does not pay for a drafting model's forward over the prompt."""
    said: list[str] = []

    class Reader(Drafter):
        def read_prompt(self) -> None:
            said.append("read")

        def observe(self, commit: Commit) -> None:
            said.append("observe")

        def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
            said.append("draft")
            return TokenTree.root_only(context.last_token)

    spec = {"drafter": Reader(), "fallback": False}
    llama.generate(prompt(), max_new_tokens=5, do_sample=False, tree_spec=spec)
    assert said == ["observe", "read", "draft", "observe", "draft", "observe", "draft", "observe"]
    plain_until(15)
    said.clear()
    llama.generate(prompt(), max_new_tokens=5, do_sample=False, tree_spec=spec)
    assert said == ["observe"] * 3 + ["read", "draft", "observe"]
    plain_until(100)
    said.clear()
    llama.generate(prompt(), max_new_tokens=5, do_sample=False, tree_spec=spec)
    assert said == ["observe"] * 4


def test_streamers_end_when_a_call_is_refused_late(llama: PreTrainedModel) -> None:
    """A consumer on another thread must not wait forever for a text that is not coming."""
    recorder = Recorder()
    with pytest.raises(hf_treespec.UnsupportedArgumentError, match="a batch of 2"):
        llama.generate(prompt().repeat(2, 1), tree_spec=True, streamer=recorder, **GREEDY)
    assert recorder.ended == 1
