"""Assistants with another tokenizer: the translation both ways, the same text, and drafts that are really accepted."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from conftest import LLAMA, WIDE_OPEN
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

import hf_treespec
from hf_treespec import (
    Budget,
    Commit,
    DraftContext,
    DrafterError,
    Prompt,
    TokenTree,
    UniversalDrafter,
    UnsupportedArgumentError,
)
from hf_treespec.drafters.universal import _common
from hf_treespec.support import same_tokenizer
from hf_treespec.translation import Translation
from hf_treespec.verify import Verified

TEXT = (
    "The unbelievable story of the lighthouse keeper begins on a stormy night. The keeper, an old man of few words, "
    "heard the bells of a ship that nobody expected. He climbed the stairs, all 199 of them, and lit the lamp again "
    "and again: 1, 2, 3 times.\n\nNobody believed the keeper's story at first — not the captain, not the crew. "
    "Café owners told it for years… and the lighthouse still stands. 🌊🚢 Its keeper's name was Zoë.\n"
)
KINDS = ("coarse", "fine", "pieces")


@functools.cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Byte-level ones with different merges, and one of pieces with a space before each word, bytes for what is rare."""
    special = {"coarse": ["<eos>", "<s>", "<turn>"], "fine": ["<turn>", "</s>", "<pad>"], "pieces": ["<s>", "<unk>"]}[
        kind
    ]
    if kind == "pieces":
        plain = TEXT.replace("\n", " ").replace("🚢", "").replace("🌊", "").replace("ë", "e")
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=220, special_tokens=special, show_progress=False)
        inner.train_from_iterator([plain], trainer)
        form = json.loads(inner.to_str())
        size = len(form["model"]["vocab"])
        form["model"]["vocab"].update({f"<0x{i:02X}>": size + i for i in range(256)})
        form["model"]["byte_fallback"] = True
        inner = tokenizers.Tokenizer.from_str(json.dumps(form))
        inner.decoder = tokenizers.decoders.Sequence(
            [
                tokenizers.decoders.Replace("▁", " "),
                tokenizers.decoders.ByteFallback(),
                tokenizers.decoders.Fuse(),
                tokenizers.decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=460 if kind == "coarse" else 300,
            special_tokens=special,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator([TEXT[: len(TEXT) if kind == "coarse" else 160]], trainer)
    more = {"coarse": {"eos_token": "<eos>"}, "fine": {"eos_token": "</s>"}, "pieces": {"bos_token": "<s>"}}[kind]
    made = PreTrainedTokenizerFast(tokenizer_object=inner, **more)
    made.add_special_tokens({"additional_special_tokens": [t for t in special if t not in more.values()]})
    return made


def encode(kind: str, text: str) -> list[int]:
    return tokenizer(kind)(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def reciting(kind: str, text: str = TEXT, doubt: float = 0.0) -> LlamaForCausalLM:
    """Says token after token of a text, whatever it reads; `doubt` parts of its logits are its own noise."""
    torch.manual_seed(1)
    options = {**LLAMA, "vocab_size": len(tokenizer(kind)), "max_position_embeddings": 1024}
    model = LlamaForCausalLM(LlamaConfig(**options)).eval()
    lesson = encode(kind, text)
    lesson_and_beyond = torch.tensor([*lesson, *[lesson[-1]] * 999])

    def recite(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        length = kwargs["input_ids"].shape[1]
        places = kwargs.get("position_ids", torch.arange(length)[None])[:, length - out.logits.shape[1] :]
        out.logits = (doubt * out.logits).scatter(2, lesson_and_beyond[places + 1][:, :, None], 9.0)
        return out

    model.register_forward_hook(recite, with_kwargs=True)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


@functools.cache
def random_model(kind: str, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    options = {**LLAMA, "vocab_size": len(tokenizer(kind)), "max_position_embeddings": 512}
    model = LlamaForCausalLM(LlamaConfig(**options)).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def pair(target: str, assistant: str) -> dict[str, Any]:
    return {"tokenizer": tokenizer(target), "assistant_tokenizer": tokenizer(assistant)}


PAIRS = [(a, b) for a in KINDS for b in KINDS if a != b]


def whole(kind: str, ids: list[int]) -> str:
    """The text of as many tokens as are whole characters."""
    text = tokenizer(kind).decode(ids)
    return whole(kind, ids[:-1]) if text.endswith("\ufffd") else text


# -------------------------------------------------------------------- to the assistant


@pytest.mark.parametrize("target, assistant", PAIRS)
def test_the_assistant_reads_what_it_would_write_of_the_whole_text(target: str, assistant: str) -> None:
    """After every committed token, and after several at once."""
    ids = encode(target, TEXT)
    for start, step in ((1, 1), (30, 3), (7, 11)):
        translation = Translation(tokenizer(target), tokenizer(assistant), ids[:start])
        done = start
        while done < len(ids):
            translation.read(ids[done : done + step])
            done = min(done + step, len(ids))
            text = whole(target, ids[:done])
            assert translation.ids == encode(assistant, text), text
    assert tokenizer(assistant).decode(translation.ids) == tokenizer(target).decode(ids)


def test_bytes_that_never_become_a_character_are_not_waited_for() -> None:
    token = tokenizer("fine").convert_tokens_to_ids("Ã")  # the byte that begins é
    translation = Translation(tokenizer("fine"), tokenizer("coarse"), encode("fine", "The"))
    for count in range(1, 9):
        translation.read([token])
        assert len(translation._committed[len(translation._committed) - translation._pending :]) <= 4, count
    translation.read(encode("fine", " old"))
    assert tokenizer("coarse").decode(translation.ids).endswith(" old")


def test_special_tokens_go_over_where_both_have_them() -> None:
    fine, coarse = tokenizer("fine"), tokenizer("coarse")
    turn, pad = fine.convert_tokens_to_ids(["<turn>", "<pad>"])
    ids = [pad, turn, *encode("fine", "The keeper"), pad, *encode("fine", " old"), turn]
    translation = Translation(fine, coarse, ids)
    theirs = coarse.convert_tokens_to_ids("<turn>")
    assert translation.ids == [theirs, *encode("coarse", "The keeper"), *encode("coarse", " old"), theirs]
    translation.read(encode("fine", "The"))
    assert translation.ids[-2:] == [theirs, *encode("coarse", "The")]


def test_the_assistants_opening_stands_once() -> None:
    pieces = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer("pieces")._tokenizer.to_str()), bos_token="<s>"
    )
    bos = pieces.bos_token_id
    pieces._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    assert Translation(tokenizer("fine"), pieces, encode("fine", "The")).ids == [bos, *encode("pieces", "The")]
    coarse = tokenizer("coarse")  # it has an <s> of its own
    start = [coarse.convert_tokens_to_ids("<s>"), *encode("coarse", "The")]
    assert Translation(coarse, pieces, start).ids == [bos, *encode("pieces", "The")]


# -------------------------------------------------------------------- and back


@pytest.mark.parametrize("target, assistant", PAIRS)
def test_drafts_come_back_as_the_targets_own_tokens(target: str, assistant: str) -> None:
    ids = encode(target, TEXT)
    translated = 0
    for done in range(5, len(ids), 7):
        before, after = tokenizer(target).decode(ids[:done]), tokenizer(target).decode(ids[: done + 12])
        own, full = encode(assistant, before), encode(assistant, after)
        if before.endswith("\ufffd") or after.endswith("\ufffd") or full[: len(own)] != own:
            continue
        translation = Translation(tokenizer(target), tokenizer(assistant), ids[:done])
        scores = np.linspace(0.9, 0.1, len(full) - len(own)).tolist()
        tree = translation.tree(TokenTree.chain(own[-1], full[len(own) :], scores), ids[done - 1], 10**6)
        tree.check(len(tokenizer(target)))
        assert tree.tokens[0].tolist() == ids[done - 1 : done + 12]
        translated += 1
        # each token has the score of the assistant's token in which its last character lies
        for node in range(1, len(tree)):
            text = tokenizer(target).decode(ids[: done + node])
            if not text.endswith("\ufffd"):
                reached = next(
                    i
                    for i in range(len(own), len(full) + 1)
                    if len(tokenizer(assistant).decode(full[:i]).rstrip("\ufffd")) >= len(text)
                )
                assert tree.scores[0, node] == pytest.approx(scores[reached - len(own) - 1])
    assert translated > 3


def test_paths_are_merged_and_share_the_better_score() -> None:
    translation = Translation(tokenizer("coarse"), tokenizer("fine"), encode("coarse", "The"))
    own = encode("fine", " keeper"), encode("fine", " keepers"), encode("fine", " old man")
    drafted = TokenTree.from_paths(translation.ids[-1], own)
    scores = [1.0] * len(drafted)
    for node in range(1, len(drafted)):
        scores[node] = 0.9 ** len(drafted.path(node))
    drafted = TokenTree(drafted.tokens, drafted.parents, scores)
    root = encode("coarse", "The")[-1]
    tree = translation.tree(drafted, root, 10**6)
    tree.check()
    found = {tokenizer("coarse").decode(tree.tokens[0, tree.path(n)[1:]].tolist()) for n in range(1, len(tree))}
    assert {" keeper", " keepers", " old", " old man"} <= found
    pairs = list(zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)


def test_a_path_that_would_write_committed_tokens_anew_is_dropped() -> None:
    """The target has said " light"; its " lighthouse" is one token, which cannot follow."""
    coarse = tokenizer("coarse")
    assert len(encode("coarse", " lighthouse")) == len(encode("coarse", " light")) == 1
    ids = encode("coarse", "The light")
    translation = Translation(coarse, tokenizer("fine"), ids)
    drafted = TokenTree.chain(translation.ids[-1], encode("fine", "house"))
    assert len(translation.tree(drafted, ids[-1], 10**6)) == 1


def test_special_tokens_of_the_assistant_end_a_path() -> None:
    fine = tokenizer("fine")
    translation = Translation(tokenizer("coarse"), fine, encode("coarse", "The"))
    end = fine.eos_token_id
    old, man = encode("fine", " old"), encode("fine", " man")
    drafted = TokenTree.from_paths(translation.ids[-1], [[*old, end, *man], [end], [len(fine) + 3, *old]])
    tree = translation.tree(drafted, encode("coarse", "The")[-1], 10**6)
    assert tokenizer("coarse").decode(tree.tokens[0, 1:].tolist()) == " old"
    assert "</s>" not in tokenizer("coarse").decode(tree.tokens[0].tolist())


def test_half_a_character_is_cut_back_and_half_a_committed_one_is_continued() -> None:
    before, wave = "The lighthouse", " 🌊"
    fine, coarse = tokenizer("fine"), tokenizer("coarse")
    ids, drafted = encode("coarse", before), encode("fine", wave)
    assert len(drafted) > 3
    translation = Translation(coarse, fine, ids)
    half = translation.tree(TokenTree.chain(translation.ids[-1], drafted[:-1]), ids[-1], 10**6)
    assert "\ufffd" not in coarse.decode(half.tokens[0].tolist())
    whole = translation.tree(TokenTree.chain(translation.ids[-1], drafted), ids[-1], 10**6)
    assert coarse.decode(whole.tokens[0, 1:].tolist()) == wave
    # and the other way round: the target stands within the character, the assistant drafts it from its beginning
    ids = encode("fine", before + wave)[:-2]
    translation = Translation(fine, coarse, ids)
    assert translation.ids == encode("coarse", before + " ")
    tree = translation.tree(TokenTree.chain(translation.ids[-1], encode("coarse", "🌊")), ids[-1], 10**6)
    assert fine.decode([*ids, *tree.tokens[0, 1:].tolist()]) == before + wave
    other = TokenTree.chain(translation.ids[-1], encode("coarse", "é and more"))  # another character cannot follow
    assert len(translation.tree(other, ids[-1], 10**6)) == 1


def test_tokens_that_the_target_does_not_have_are_cut() -> None:
    translation = Translation(tokenizer("coarse"), tokenizer("fine"), encode("coarse", "The"))
    drafted = TokenTree.chain(translation.ids[-1], encode("fine", " old keeper"))
    whole = translation.tree(drafted, 5, 10**6)
    limit = int(whole.tokens[0, 1:].max())
    tree = translation.tree(drafted, 5, limit)
    assert len(tree) == whole.tokens[0].tolist().index(limit)


# -------------------------------------------------------------------- decoding


@pytest.mark.parametrize("target, assistant", PAIRS)
def test_the_same_text_from_models_that_speak_noise(target: str, assistant: str) -> None:
    """Their texts are no words, often no characters: nothing may break, greedy and sampled."""
    model, small = random_model(target), random_model(assistant, 1)
    for do_sample in (False, True):
        common = {"max_new_tokens": 24, "do_sample": do_sample}
        ids = torch.tensor([encode(target, TEXT[:60])])
        torch.manual_seed(3)
        expected = model.generate(ids, **common)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        spec = {"drafter": "universal", **WIDE_OPEN}
        text = model.generate(ids, tree_spec=spec, assistant_model=small, **pair(target, assistant), **common)
        assert torch.equal(text, expected)
        assert torch.equal(torch.get_rng_state(), state)


def test_an_assistant_with_sliding_windows() -> None:
    """Its cache is cut back now and then, and its oldest keys may be gone by then."""
    torch.manual_seed(0)
    options = {**LLAMA, "vocab_size": len(tokenizer("coarse")), "sliding_window": 8}
    small = MistralForCausalLM(MistralConfig(**options)).eval()
    model, ids = reciting("fine"), torch.tensor([encode("fine", TEXT)[:30]])
    common = {"max_new_tokens": 120, "do_sample": False}
    spec = {"drafter": UniversalDrafter(min_gain=0.0), **WIDE_OPEN}
    text = model.generate(ids, tree_spec=spec, assistant_model=small, **pair("fine", "coarse"), **common)
    assert torch.equal(text, model.generate(ids, **common))
    assert text.tree_spec.drafted > 500


@pytest.mark.parametrize("target, assistant", PAIRS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_an_assistant_that_knows_the_text_is_believed(target: str, assistant: str, do_sample: bool) -> None:
    doubt = 0.1 if do_sample else 0.0
    model, small = reciting(target, doubt=doubt), reciting(assistant, doubt=doubt)
    ids = torch.tensor([encode(target, TEXT)[:12]])
    new = len(encode(target, TEXT)) - 13
    common = {"max_new_tokens": min(new, 120), "do_sample": do_sample}
    torch.manual_seed(5)
    expected = model.generate(ids, **common)
    torch.manual_seed(5)
    spec = {"drafter": "universal", "fallback": False, "debug": True}
    text = model.generate(ids, tree_spec=spec, assistant_model=small, **pair(target, assistant), **common)
    assert torch.equal(text, expected)
    assert text.tree_spec.tokens_per_round > (1.5 if do_sample else 2.5)


def test_contract() -> None:
    for target, assistant in (("coarse", "fine"), ("pieces", "coarse")):
        prompts = [torch.tensor([encode(target, t)]) for t in (TEXT[:40], TEXT[300:360])]
        more = {"assistant_model": random_model(assistant), **pair(target, assistant)}
        hf_treespec.check_drafter(UniversalDrafter(), random_model(target), prompts=prompts, max_new_tokens=8, **more)


@pytest.mark.parametrize("accept", [0, 1, "all"])
@pytest.mark.parametrize("target, assistant", [("coarse", "fine"), ("fine", "coarse"), ("pieces", "coarse")])
def test_draft_after_acceptance_equals_a_fresh_drafters(target: str, assistant: str, accept: Any) -> None:
    """What the cache keeps, cuts back and reads anew is what a fresh one would hold."""
    small = random_model(assistant, 2)
    lesson = encode(target, TEXT)
    vocabulary = len(tokenizer(target))
    budget = Budget(max_nodes=20, max_depth=5, max_children=3)

    def started(ids: list[int], *, read: bool = True) -> UniversalDrafter:
        drafter = UniversalDrafter(small, min_gain=0.0, **pair(target, assistant)).for_call()
        verified = Verified(TokenTree.root_only(ids[-2]), torch.zeros(1, 1, vocabulary))
        drafter.start(Prompt(small, torch.tensor([ids[:-1]]), None, False, LogitsProcessorList(), None, 64, verified))
        drafter.observe(Commit([[ids[-1]]], [[0]], [ids[-1]], verified))
        if read:
            drafter.read_prompt()
        assert isinstance(drafter, UniversalDrafter)
        return drafter

    def paths(tree: TokenTree) -> list[tuple[Any, ...]]:
        nodes = range(1, len(tree))
        return sorted((tuple(tree.tokens[0, tree.path(n)].tolist()), round(float(tree.scores[0, n]), 4)) for n in nodes)

    ids = lesson[:15]
    kept = started(ids[:-3], read=False)
    for end in range(len(ids) - 3, len(ids)):  # rounds in which it is not asked
        root = Verified(TokenTree.root_only(ids[end - 1]), torch.zeros(1, 1, vocabulary))
        kept.observe(Commit([[ids[end]]], [[0]], [ids[end]], root))
    kept.read_prompt()
    for round_number in range(12):
        context = DraftContext(torch.tensor([ids]), [ids[-1]], None, 100)
        tree, fresh = kept.draft(context, budget), started(ids)
        expected = fresh.draft(context, budget)
        assert kept._ids == fresh._ids
        assert [p for p, _ in paths(tree)] == [p for p, _ in paths(expected)]
        np.testing.assert_allclose([s for _, s in paths(tree)], [s for _, s in paths(expected)], atol=2e-4)
        if round_number % 3 == 2:  # the text that words are made of: the assistant's end changes now and then
            tokens = lesson[len(ids) : len(ids) + 2]
            path = [0]
        else:
            leaf = (len(tree) - 1) - round_number % max(1, len(tree) // 2)
            path = tree.path(leaf)[: None if accept == "all" else accept + 1]
            tokens = [*tree.tokens[0, path[1:]].tolist(), lesson[len(ids) % len(lesson)]]
        kept.observe(Commit([tokens], [path], [tokens[-1]], Verified(tree, torch.zeros(1, len(tree), vocabulary))))
        ids = ids + tokens


@pytest.mark.parametrize("likely", [0, 2, 3, 5])
def test_common(likely: int) -> None:
    assert _common([1, 2, 3, 4], [1, 2, 3, 5, 6], likely) == 3
    assert _common([1, 2], [1, 2, 3], likely) == 2
    assert _common([], [1], likely) == 0


def test_padding_and_a_prompt_beyond_the_assistants_reach() -> None:
    model, small = reciting("coarse"), reciting("fine")
    ids = encode("coarse", TEXT)[:12]
    padded = torch.tensor([[0, 0, 0, *ids]])
    more = {"attention_mask": (torch.arange(15) >= 3).long()[None], "max_new_tokens": 30, "do_sample": False}
    expected = model.generate(padded, **more)
    spec = {"drafter": "universal", "fallback": False}
    text = model.generate(padded, tree_spec=spec, assistant_model=small, **pair("coarse", "fine"), **more)
    assert torch.equal(text, expected) and text.tree_spec.tokens_per_round > 2
    small.config.max_position_embeddings = 60
    text = model.generate(padded, tree_spec=spec, assistant_model=small, **pair("coarse", "fine"), **more)
    assert torch.equal(text, expected)
    assert text.tree_spec.records[1].drafted > 0 and text.tree_spec.records[-1].drafted == 0
    small.config.max_position_embeddings = 4
    text = model.generate(padded, tree_spec=spec, assistant_model=small, **pair("coarse", "fine"), **more)
    assert torch.equal(text, expected) and text.tree_spec.drafted == 0


# -------------------------------------------------------------------- who is asked, and what is refused

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}


def test_auto_translates_where_the_tokenizers_differ() -> None:
    model, ids = random_model("coarse"), torch.tensor([encode("coarse", TEXT[:60])])
    text = model.generate(ids, tree_spec=True, assistant_model=random_model("fine"), **pair("coarse", "fine"), **GREEDY)
    assert text.tree_spec.drafter == "universal"
    same = pair("coarse", "coarse")
    text = model.generate(ids, tree_spec=True, assistant_model=random_model("coarse", 1), **same, **GREEDY)
    assert text.tree_spec.drafter == "model"


def test_releases_of_one_tokenizer_are_the_same_to_us() -> None:
    one = tokenizer("coarse")
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(one._tokenizer.to_str()))
    assert same_tokenizer(one, other) and same_tokenizer(one, one)
    other.add_tokens(["<think>", "</think>"])
    assert same_tokenizer(one, other) and same_tokenizer(other, one)
    other.add_tokens([f"<{i}>" for i in range(300)])
    assert same_tokenizer(one, other)  # what the smaller one has, both have
    assert not same_tokenizer(one, tokenizer("fine")) and not same_tokenizer(tokenizer("pieces"), one)


REFUSED: list[tuple[Any, tuple[str, ...], type[Exception], str]] = [
    (True, ("assistant_model", "assistant_tokenizer"), DrafterError, "'universal' needs tokenizer="),
    ("universal", ("assistant_model", "tokenizer"), DrafterError, "'universal' needs assistant_tokenizer="),
    ("universal", ("tokenizer", "assistant_tokenizer"), DrafterError, "'universal' needs assistant_model="),
    ("universal", (), DrafterError, "needs assistant_model=, tokenizer=, assistant_tokenizer="),
    (True, ("tokenizer", "assistant_tokenizer"), UnsupportedArgumentError, "assistant_tokenizer=.*'union' without"),
    ("ngram", ("assistant_tokenizer",), UnsupportedArgumentError, "assistant_tokenizer=.*'ngram' without"),
    ("model", ("assistant_model", "tokenizer", "assistant_tokenizer"), DrafterError, "tree_spec='universal'"),
]


@pytest.mark.parametrize("spec, given, kind, message", REFUSED, ids=lambda v: str(v)[:40])
def test_refused_by_name(spec: Any, given: tuple[str, ...], kind: type[Exception], message: str) -> None:
    everything = {"assistant_model": random_model("fine"), **pair("coarse", "fine")}
    ids = torch.tensor([encode("coarse", TEXT[:60])])
    with pytest.raises(kind, match=message):
        random_model("coarse").generate(ids, tree_spec=spec, **{k: everything[k] for k in given}, **GREEDY)


def test_other_refusals() -> None:
    ids = torch.tensor([encode("coarse", TEXT[:60])])
    spec = {"tree_spec": "universal", **GREEDY}

    class Slow:
        is_fast = False

    with pytest.raises(DrafterError, match="Slow is not a fast tokenizer"):
        random_model("coarse").generate(
            ids, assistant_model=random_model("fine"), tokenizer=tokenizer("coarse"), assistant_tokenizer=Slow(), **spec
        )
    with pytest.raises(DrafterError, match="Linear is not a transformers model"):
        random_model("coarse").generate(ids, assistant_model=torch.nn.Linear(2, 2), **pair("coarse", "fine"), **spec)
    embeds = random_model("coarse").get_input_embeddings()(ids).detach()
    with pytest.raises(DrafterError, match="only inputs_embeds"):
        random_model("coarse").generate(
            inputs_embeds=embeds, assistant_model=random_model("fine"), **pair("coarse", "fine"), **spec
        )
