"""Logits of every node, and the cache after every round, against forwards without a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import FAMILIES, around, prompt, run, target
from transformers import DynamicCache, PreTrainedModel

from hf_treespec import TokenTree, _compat, attention, cache, decoding, stream, support, verify
from hf_treespec.attention import NAME, implementation, tree_attention_on
from hf_treespec.cache import TreeCache
from hf_treespec.reference import path_logits, plain_decode
from hf_treespec.verify import Verifier

TOLERANCE = 1e-4


def prefilled(model: PreTrainedModel, ids: torch.Tensor, spare: int = 4, mask: Any = None) -> Verifier:
    """A verifier over `ids` without their last token; `spare` is small so that buffers must grow."""
    source = DynamicCache(config=_compat.text_config(model))
    visible = torch.ones_like(ids) if mask is None else mask
    positions = (visible.cumsum(-1) - 1).clamp_min(0)[:, :-1]
    with torch.no_grad():
        model(
            input_ids=ids[:, :-1],
            attention_mask=None if mask is None else mask[:, :-1],
            position_ids=positions,
            use_cache=True,
            **{_compat.cache_key(model): source},
        )
    rows = None if mask is None else mask[:, :-1]
    return Verifier(model, TreeCache(source, spare=spare), positions[:, -1:], rows)


def random_tree(root: int, size: int, seed: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(rng.integers(0, i)) for i in range(1, size)]
    return TokenTree([root, *rng.integers(2, 61, size - 1).tolist()], parents)


def a_leaf_path(tree: TokenTree, seed: int) -> list[int]:
    """A path from the root that takes a non-first child wherever there is one."""
    rng = np.random.default_rng(seed)
    node, path = 0, [0]
    while (children := np.flatnonzero(tree.parents[0] == node)).size:
        node = int(children[-1] if rng.random() < 0.8 else rng.choice(children))
        path.append(node)
    return path


def rounds_error(model: PreTrainedModel, ids: torch.Tensor, rounds: int = 8) -> float:
    """The largest difference between tree logits and uncached ones over rounds that accept whole random paths."""
    worst = 0.0
    with tree_attention_on(model):
        verifier = prefilled(model, ids)
        for seed in range(rounds):
            tree = random_tree(int(ids[0, -1]), 9, seed)
            verified = verifier.forward(tree)
            worst = max(worst, float((verified.logits[0] - path_logits(model, ids, tree)).abs().max()))
            path = a_leaf_path(tree, seed)
            verifier.cache.keep([path])
            ids = torch.cat([ids, torch.from_numpy(tree.tokens[:, path[1:]]), torch.tensor([[seed + 5]])], 1)
    return worst


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_node_logits_equal_uncached_forwards_over_many_rounds(family: str, attention: str) -> None:
    """To 1e-4, after rounds that accept non-first children, beyond sliding windows and buffer growth."""
    assert rounds_error(target(family, attention), prompt(14)) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_cache_after_each_round_equals_a_fresh_prefill(family: str) -> None:
    model = target(family)
    text = model.generate(prompt(), max_new_tokens=24, do_sample=False)
    drafter = around(text, "truth_last")

    checked = 0
    rounds = stream(model, inputs=prompt(), max_new_tokens=24, do_sample=False, tree_spec={"drafter": drafter})
    committed = prompt()[0].tolist()
    for record in rounds:
        committed += record.committed
        held = rounds._decoding.cache
        fresh = DynamicCache()
        with torch.no_grad():
            model(input_ids=torch.tensor([committed[:-1]]), use_cache=True, **{_compat.cache_key(model): fresh})
        for layer, expected in zip(held.layers, fresh.layers, strict=True):
            assert layer.get_seq_length() == len(committed) - 1
            for ours, theirs in ((layer.keys, expected.keys), (layer.values, expected.values)):
                torch.testing.assert_close(ours, theirs[..., layer.offset :, :], atol=TOLERANCE, rtol=0)
        checked += 1
    assert checked > 4
    assert rounds.result.tolist() == text.tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_shortened_cache_is_that_of_the_shorter_text(family: str) -> None:
    """After a tree that was never kept, too; positions follow."""
    model, ids = target(family), prompt(20)
    with tree_attention_on(model):
        verifier = prefilled(model, ids)
        for length in (16, 11, 3):
            verifier.forward(random_tree(int(ids[0, -1]), 7, length))
            assert verifier.cache.shorten(length)
            assert verifier.cache.get_seq_length() == length and verifier.cache.lengths.tolist() == [length]
            tree = random_tree(int(ids[0, length]), 9, length)
            logits = verifier.forward(tree).logits[0]
            verifier.cache.truncate()
            expected = path_logits(model, ids[:, : length + 1], tree)
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_a_cache_is_not_shortened_into_what_a_sliding_layer_has_dropped() -> None:
    cache = prefilled(target("gemma3"), prompt(20)).cache  # 19 tokens, of which the window's layer holds 7
    assert not cache.shorten(12)
    assert cache.filled == cache.get_seq_length() == 19
    assert cache.shorten(13)
    assert cache.filled == cache.get_seq_length() == 13


def test_a_sliding_layer_drops_old_keys_and_stays_exact(monkeypatch: Any) -> None:
    """Buffers of a sliding layer move instead of growing with the text."""
    monkeypatch.setattr(cache, "MIN_GROWTH", 8)
    monkeypatch.setattr(decoding, "MAX_SPARE", 8)
    model = target("mistral")
    text = model.generate(prompt(20), max_new_tokens=80, do_sample=False)

    rounds = stream(model, inputs=prompt(20), max_new_tokens=80, tree_spec={"drafter": around(text, "truth_last")})
    for _ in rounds:
        layer = rounds._decoding.cache.tree_layers[0]
        ids = rounds._decoding.text.ids
    assert layer.offset > 40
    assert torch.equal(rounds.result, text)
    assert rounds_error(model, ids, rounds=3) < TOLERANCE


def test_left_padding_is_hidden_and_shifts_positions(llama: PreTrainedModel) -> None:
    ids = prompt(10)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = (torch.arange(13) >= 3).long()[None]
    tree = random_tree(int(ids[0, -1]), 7, seed=2)
    with tree_attention_on(llama):
        logits = prefilled(llama, padded, mask=mask).forward(tree).logits[0]
    torch.testing.assert_close(logits, path_logits(llama, ids, tree), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_of_a_batch_go_at_their_own_pace(family: str) -> None:
    """The row axis of tree, mask, positions and cache: two texts, trees of different sizes, ragged acceptance."""
    model = target(family)
    texts = [prompt(12, seed=1), prompt(12, seed=2)]
    with tree_attention_on(model):
        verifier = prefilled(model, torch.cat(texts))
        for seed in range(4):
            trees = [random_tree(int(t[0, -1]), size, seed + 10 * size) for t, size in zip(texts, (5, 8), strict=True)]
            both = TokenTree.stack(trees)
            logits = verifier.forward(both).logits
            paths = [a_leaf_path(tree, seed) for tree in trees]
            for row, tree in enumerate(trees):
                expected = path_logits(model, texts[row], tree)
                torch.testing.assert_close(logits[row, : len(tree)], expected, atol=TOLERANCE, rtol=0)
            verifier.cache.keep(paths)
            for row, (tree, path) in enumerate(zip(trees, paths, strict=True)):
                new = torch.from_numpy(tree.tokens[:, path[1:]])
                texts[row] = torch.cat([texts[row], new, torch.tensor([[seed + 3]])], 1)
    assert texts[0].shape != texts[1].shape


def test_the_mask_is_the_one_that_is_drawn(llama: PreTrainedModel) -> None:
    """The grid in the module docstring is computed, not only drawn."""
    drawn = [line.split("node ")[1] for line in (verify.__doc__ or "").splitlines() if "    node " in line]
    expected = [[cell == "1" for cell in row.split()[1:]] for row in drawn]
    tree = TokenTree([9, 8, 7, 6, 5, 6], [-1, 0, 0, 1, 1, 2])
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    with tree_attention_on(llama):
        verifier = prefilled(llama, prompt(5), mask=mask)
        verifier._fold = 1
        assert (verifier.mask(tree)[0, 0] == 0).tolist() == expected


# -------------------------------------------------------------------- a test must be able to fail


def test_one_layers_mask_is_that_of_its_kind() -> None:
    """For models whose layers run one by one, each on a cache of its own that may have dropped other old keys."""
    model = target("gemma3")  # a sliding layer, then a full one
    whole = prefilled(model, prompt(20))
    tree = random_tree(3, 6, 0)
    masks = whole.mask(tree)
    last = torch.full((1, 1), 18)
    for layer, kind in enumerate(("sliding_attention", "full_attention")):
        single = Verifier(model, whole.cache, last, layer=layer)
        assert torch.equal(single.mask(tree), masks[kind])
        assert single.rows_are_plain == (kind == "full_attention")
    whole.cache.layers[1].offset = 2  # as if only the other layer had dropped keys
    assert single.mask(tree).shape[-1] == masks["full_attention"].shape[-1] - 2


def _everything_visible(self: TokenTree) -> np.ndarray:
    return np.tril(np.ones((self.rows, len(self), len(self)), dtype=bool))


PLANTED = {
    "siblings see each other": lambda m: m.setattr(
        TokenTree, "ancestors", property(lambda self: _everything_visible(self))
    ),
    "positions by slot": lambda m: m.setattr(
        Verifier, "positions", lambda self, tree, start=0: self._next_position + torch.arange(len(tree))[None]
    ),
    "the first nodes are kept instead of the path": lambda m: m.setattr(
        TreeCache, "keep", _keeping(lambda row: list(range(len(row))))
    ),
    "one slot too few is kept": lambda m: m.setattr(TreeCache, "keep", _keeping(lambda row: row[:-1])),
    "windows ignored": lambda m: m.setattr(verify, "_in_reach", lambda kind, query, key: key == key + 0 * query),
}


def _keeping(change: Any) -> Any:
    original = TreeCache.keep
    return lambda self, rows: original(self, [change(list(row)) for row in rows])


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str, monkeypatch: Any) -> None:
    model = target("gemma3")
    PLANTED[bug](monkeypatch)
    try:
        error = rounds_error(model, prompt(14))
    except (AssertionError, RuntimeError):
        return
    assert error > 10 * TOLERANCE


@pytest.mark.parametrize("bug", ["siblings see each other", "positions by slot"])
def test_the_self_check_catches_wrong_masks_and_positions(bug: str, monkeypatch: Any, llama: PreTrainedModel) -> None:
    assert support.tree_error(llama) < 1e-5
    PLANTED[bug](monkeypatch)
    assert support.tree_error(llama) > 1e-2


# -------------------------------------------------------------------- attention


@pytest.mark.parametrize("folds", [True, False])
def test_grouped_heads_are_not_copied(folds: bool, llama: PreTrainedModel, monkeypatch: Any) -> None:
    """No attention call of a tree forward sees keys of more heads than the cache holds, or a copy of them."""
    if not folds and not attention._shares_keys_on_cpu():
        pytest.skip("this torch copies keys for each head on a CPU")
    monkeypatch.setattr(attention, "folds", lambda device: folds)
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
        seen.append((query.shape[1], key.shape[1], key.data_ptr()))
        return original(query, key, value, **kwargs)

    monkeypatch.setattr("hf_treespec.attention.scaled_dot_product_attention", spy)
    with tree_attention_on(llama):
        ids = prompt(12)
        verifier = prefilled(llama, ids, spare=64)
        tree = random_tree(int(ids[0, -1]), 8, seed=0)
        logits = verifier.forward(tree).logits[0]
    torch.testing.assert_close(logits, path_logits(llama, ids, tree), atol=TOLERANCE, rtol=0)
    assert len(seen) == llama.config.num_hidden_layers
    for (query_heads, key_heads, pointer), layer in zip(seen, verifier.cache.tree_layers, strict=True):
        assert key_heads == llama.config.num_key_value_heads
        assert query_heads == (key_heads if folds else llama.config.num_attention_heads)
        assert pointer == layer.keys.data_ptr()


def test_no_copy_of_the_prefix_in_a_round(llama: PreTrainedModel) -> None:
    """Appending and keeping work in the buffers that prefill's end allocated."""
    with tree_attention_on(llama):
        verifier = prefilled(llama, prompt(12), spare=64)
        pointers = [layer.keys.data_ptr() for layer in verifier.cache.tree_layers]
        for seed in range(3):
            tree = random_tree(5, 8, seed)
            verifier.forward(tree)
            verifier.cache.keep([a_leaf_path(tree, seed)])
        assert pointers == [layer.keys.data_ptr() for layer in verifier.cache.tree_layers]


def test_the_model_gets_its_own_attention_back(llama: PreTrainedModel) -> None:
    with tree_attention_on(llama):
        assert implementation(llama) == NAME
        with tree_attention_on(llama):
            pass
        assert implementation(llama) == NAME
    assert implementation(llama) == "sdpa"


def test_oracle_agrees_with_generate(llama: PreTrainedModel) -> None:
    """The uncached oracle and transformers' own loop give one text, greedy and sampled."""
    for do_sample in (False, True):
        torch.manual_seed(0)
        expected = llama.generate(prompt(), max_new_tokens=8, do_sample=do_sample, top_k=0 if do_sample else None)
        torch.manual_seed(0)
        assert torch.equal(plain_decode(llama, prompt(), 8, do_sample=do_sample), expected)
        torch.manual_seed(0)
        assert torch.equal(
            run(llama, prompt(), max_new_tokens=8, do_sample=do_sample, top_k=0 if do_sample else None), expected
        )
