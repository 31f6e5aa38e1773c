"""Medusa heads: random checkpoints in the public layouts, against a slow recomputation that shares nothing with them."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, output_that_knows, plain, prompt
from safetensors.torch import save_file
from torch.nn.functional import silu
from transformers import PreTrainedModel

import hf_treespec
from hf_treespec import Budget, CheckpointError, DraftContext, DrafterError, MedusaDrafter, TokenTree, _compat
from hf_treespec.drafters.medusa import MedusaHeads

H = 32
Tensors = dict[str, torch.Tensor]
# As published (`medusa_choices.py`, the list for 7B models with 63 nodes)
PUBLISHED = [
    [0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 3], [4], [0, 4], [2, 0], [0, 5], [0, 0, 1],
    [5], [0, 6], [6], [0, 7], [0, 1, 0], [1, 1], [7], [0, 8], [0, 0, 2], [3, 0], [0, 9], [8], [9], [1, 0, 0],
    [0, 2, 0], [1, 2], [0, 0, 3], [4, 0], [2, 1], [0, 0, 4], [0, 0, 5], [0, 0, 0, 0], [0, 1, 1], [0, 0, 6],
    [0, 3, 0], [5, 0], [1, 3], [0, 0, 7], [0, 0, 8], [0, 0, 9], [6, 0], [0, 4, 0], [1, 4], [7, 0], [0, 1, 2],
    [2, 0, 0], [3, 1], [2, 2], [8, 0], [0, 5, 0], [1, 5], [1, 0, 1], [0, 2, 1], [9, 0], [0, 6, 0], [0, 0, 0, 1],
    [1, 6], [0, 7, 0],
]  # fmt: skip


def rand(*shape: int, scale: float = 0.3) -> torch.Tensor:
    return (torch.randn(*shape) * scale).half()


def blocks(heads: int, layers: int, own: bool, prefix: str = "") -> Tensors:
    """The blocks of one head are one module in training: all of its names hold the same numbers."""
    found: Tensors = {}
    for i in range(heads):
        weight, bias = rand(H, H), rand(H)
        for j in range(layers):
            found[f"{prefix}{i}.{j}.linear.weight"], found[f"{prefix}{i}.{j}.linear.bias"] = (
                weight.clone(),
                bias.clone(),
            )
        if own:
            found[f"{prefix}{i}.{layers}.weight"] = rand(VOCAB, H)
    return found


def write(folder: Path, layout: str, seed: int = 0) -> tuple[Path, Tensors]:
    """A checkpoint; returns its tensors by the names of Medusa-1, in float32."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {"medusa_num_layers": 1, "base_model_name_or_path": "someone/llama"}
    if layout == "medusa1":  # the published config is wrong about its heads
        tensors = blocks(5, 1, own=True)
        torch.save(tensors, folder / "medusa_lm_head.pt")
        config["medusa_num_heads"] = 2
    elif layout == "medusa1_tied":  # of the later training code: the heads end in the target's lm_head
        tensors = blocks(3, 1, own=False)
        save_file(tensors, folder / "medusa_lm_head.safetensors")
        config |= {"medusa_num_heads": 3, "version": "2"}
    elif layout == "medusa1_deep":
        tensors = blocks(4, 3, own=True)
        save_file(tensors, folder / "medusa_lm_head.safetensors")
        config |= {"medusa_num_heads": 4, "medusa_num_layers": 3}
    else:  # a whole model, in shards; bfloat16
        tensors = {n: t.bfloat16() for n, t in blocks(3, 1, own=True, prefix="medusa_head.").items()}
        whole = tensors | {"model.embed_tokens.weight": rand(VOCAB, H), "lm_head.weight": rand(VOCAB, H)}
        names = sorted(whole)
        parts = {"pytorch_model-00001-of-00002.bin": names[:4], "pytorch_model-00002-of-00002.bin": names[4:]}
        for file, inside in parts.items():
            torch.save({n: whole[n] for n in inside}, folder / file)
        index = {"metadata": {}, "weight_map": {n: file for file, inside in parts.items() for n in inside}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        config |= {"model_type": "llama", "hidden_size": H, "vocab_size": VOCAB, "medusa_num_heads": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, {n.removeprefix("medusa_head."): t.float() for n, t in tensors.items()}


LAYOUTS = {"medusa1": 5, "medusa1_tied": 3, "medusa1_deep": 4, "medusa2": 3}


@torch.no_grad()
def slow_log_q(tensors: Tensors, target: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """(heads, V) log q after the text `ids`, from an uncached forward: the last state is that before the last token."""
    state = target(torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False).hidden_states[-1][0, -1]
    rows = []
    for i in itertools.count():
        if f"{i}.0.linear.weight" not in tensors:
            return torch.stack(rows).log_softmax(-1)
        x = state
        for j in itertools.count():
            if f"{i}.{j}.linear.weight" not in tensors:
                break
            x = x + silu(tensors[f"{i}.{j}.linear.weight"] @ x + tensors[f"{i}.{j}.linear.bias"])
        own = tensors.get(f"{i}.{j}.weight")
        rows.append(target.lm_head(x[None])[0] if own is None else own @ x)
    raise AssertionError


class Checked(MedusaDrafter):
    """Checks every tree, then adds 0, 1, 2, … true next tokens, so that rounds accept that many."""

    def __init__(self, inner: MedusaDrafter, tensors: Tensors, target: PreTrainedModel, text: list[int]) -> None:
        self.__dict__.update(inner.__dict__)
        self.tensors, self.target, self.text = tensors, target, text
        self.trees: list[tuple[list[int], TokenTree]] = []
        self.pad = 0

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        tree = super().draft(context, budget)
        tree.check(VOCAB)
        ids = context.ids[0].tolist()
        expected = slow_log_q(self.tensors, self.target, ids[self.pad :])
        for node in range(1, len(tree)):
            path = tree.tokens[0, tree.path(node)[1:]].tolist()
            score = sum(float(expected[i, token]) for i, token in enumerate(path))
            assert tree.scores[0, node] == pytest.approx(torch.tensor(score).exp().item(), abs=1e-4)
        self.trees.append((ids, tree))
        return tree.merge(TokenTree.chain(ids[-1], self.text[len(ids) : len(ids) + len(self.trees) % 4]))


class Watched(MedusaDrafter):
    """Keeps what it drafted."""

    def __init__(self, inner: MedusaDrafter) -> None:
        self.__dict__.update(inner.__dict__)
        self.trees: list[tuple[DraftContext, TokenTree]] = []
        self.draws: list[list[torch.Tensor]] = []

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        self.trees.append((context, super().draft(context, budget)))
        if context.noise is not None:
            self.draws.append([context.noise.peek(d)[0].clone() for d in range(2)])
        return self.trees[-1][1]


def assert_equal_trees(one: TokenTree, other: TokenTree) -> None:
    assert one.tokens.tolist() == other.tokens.tolist() and one.parents.tolist() == other.parents.tolist()
    torch.testing.assert_close(torch.from_numpy(one.scores), torch.from_numpy(other.scores), atol=1e-4, rtol=0)


# -------------------------------------------------------------------- what is drafted


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padded", [False, True])
def test_drafts_are_the_slow_heads(layout: str, padded: bool, llama: PreTrainedModel, tmp_path: Path) -> None:
    """Every node of every round, after none, some and all of a path were accepted; and a drafter that starts on the
    text so far drafts the same."""
    folder, tensors = write(tmp_path, layout)
    loaded = hf_treespec.load_drafter(folder, target=llama)
    assert isinstance(loaded, MedusaDrafter)
    ids, pad = prompt(7), 3 if padded else 0
    text = [0] * pad + plain(llama, ids, 24)
    given: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
    if padded:
        given["attention_mask"] = torch.tensor([[0] * pad + [1] * 7])
        ids = torch.cat([torch.zeros(1, pad, dtype=torch.long), ids], 1)
    drafter = Checked(loaded, tensors, llama, text)
    drafter.pad = pad
    spec = {"drafter": drafter, "max_nodes": 12, "fallback": False, "debug": True}
    out = llama.generate(ids, tree_spec=spec, max_new_tokens=24, **given)
    assert out.sequences[0].tolist() == text
    assert {len(record.path) - 1 for record in out.tree_spec.records[1:]} >= {0, 1, 2}
    assert max(int(tree.depths.max()) for _, tree in drafter.trees) >= 2
    if padded:
        return
    for sofar, tree in drafter.trees:
        if len(text) - len(sofar) > 5:  # where the end does not limit the depth
            fresh = Watched(loaded)
            start = torch.tensor([sofar[:-1]])
            llama.generate(start, tree_spec={**spec, "drafter": fresh}, max_new_tokens=8, **given)
            assert_equal_trees(fresh.trees[0][1], tree)


def drafts(drafter: MedusaDrafter, target: PreTrainedModel, **options: Any) -> TokenTree:
    """Its first tree after `prompt(9)`."""
    watched = Watched(drafter)
    target.generate(prompt(9), max_new_tokens=12, tree_spec={"drafter": watched, "fallback": False, **options})
    return watched.trees[0][1]


def test_the_tree_is_the_best_of_all(llama: PreTrainedModel, tmp_path: Path) -> None:
    folder, tensors = write(tmp_path, "medusa2")
    tree = drafts(hf_treespec.load_drafter(folder, target=llama), llama, max_nodes=14, max_children=5)
    ids = plain(llama, prompt(9), 1)
    ranked = slow_log_q(tensors, llama, ids).exp().sort(dim=-1, descending=True).values[:, :5]
    every = [
        float(torch.stack([ranked[d, rank] for d, rank in enumerate(path)]).prod())
        for depth in (1, 2, 3)
        for path in itertools.product(range(5), repeat=depth)
    ]
    best = sorted(every, reverse=True)[:14]
    assert sorted(tree.scores[0, 1:].tolist(), reverse=True) == pytest.approx(best, abs=1e-5)


def test_all_heads_run_once_a_round(llama: PreTrainedModel, tmp_path: Path) -> None:
    """The target's lm_head, which the heads share, is called once for verifying and once for drafting."""
    calls: list[tuple[int, ...]] = []
    handle = llama.lm_head.register_forward_hook(lambda module, given, out: calls.append(tuple(out.shape)))
    try:
        drafter = hf_treespec.load_drafter(write(tmp_path, "medusa1_tied")[0], target=llama)
        out = llama.generate(
            prompt(9),
            max_new_tokens=9,
            do_sample=False,
            tree_spec={"drafter": drafter, "fallback": False},
            return_dict_in_generate=True,
        )
    finally:
        handle.remove()
    drafted = sum(record.drafted > 0 for record in out.tree_spec.records)
    assert calls.count((3, VOCAB)) + calls.count((2, VOCAB)) + calls.count((1, VOCAB)) == drafted > 3


def test_sampled_children_follow_the_targets_noise(llama: PreTrainedModel, tmp_path: Path) -> None:
    """The first child of the root, and its first child, are the argmax of log q + g at their depth."""
    folder, tensors = write(tmp_path, "medusa1")
    drafter = Watched(hf_treespec.load_drafter(folder, target=llama))
    spec = {"drafter": drafter, "fallback": False, "max_children": 1, "max_depth": 2}
    llama.generate(prompt(6), max_new_tokens=9, do_sample=True, temperature=0.7, top_k=0, tree_spec=spec)
    full = 0
    for (context, tree), draws in zip(drafter.trees, drafter.draws, strict=True):
        scores = slow_log_q(tensors, llama, context.ids[0].tolist()) / 0.7
        expected = [int((row - draw.log()).argmax()) for row, draw in zip(scores, draws, strict=False)]
        assert tree.tokens[0, 1:].tolist() == expected[: len(tree) - 1]
        full += len(tree) == 3
    assert full >= 4


@pytest.fixture(scope="module")
def knowing(llama: PreTrainedModel) -> MedusaDrafter:
    """Heads that know the text after `prompt(9)`."""
    text = plain(llama, prompt(9), 24)
    heads = MedusaHeads(H, heads=3, vocab_size=VOCAB)
    for i, head in enumerate(heads):
        torch.nn.init.zeros_(head[0].linear.weight)
        torch.nn.init.zeros_(head[0].linear.bias)
        head[1].weight.data = output_that_knows(llama, text, i + 1)
    return MedusaDrafter(heads)


def test_good_heads_save_rounds_and_the_text_is_plain_decodings(knowing: MedusaDrafter, llama: PreTrainedModel) -> None:
    text = plain(llama, prompt(9), 24)
    given: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    out = llama.generate(prompt(9), tree_spec={"drafter": knowing, "fallback": False}, **given)
    assert out.sequences[0].tolist() == text
    assert out.tree_spec.tokens_per_round > 3
    fixed = MedusaDrafter(knowing.heads, tree=[[0], [0, 0], [0, 0, 0]])
    assert (
        llama.generate(prompt(9), tree_spec={"drafter": fixed, "fallback": False}, **given).tree_spec.tokens_per_round
        > 3
    )
    for drafter in (knowing, fixed):
        hf_treespec.check_drafter(drafter, llama, prompts=[prompt(9)])


@pytest.mark.parametrize("masked", [False, True])
def test_a_prompt_of_embeddings_can_be_drafted_for(
    masked: bool, knowing: MedusaDrafter, llama: PreTrainedModel
) -> None:
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    given["inputs_embeds"] = llama.get_input_embeddings()(prompt(9)).detach()
    if masked:
        given["attention_mask"] = torch.ones(1, 9, dtype=torch.long)
    text = llama.generate(**given).sequences
    out = llama.generate(tree_spec={"drafter": knowing, "fallback": False}, **given)
    assert torch.equal(out.sequences, text) and out.tree_spec.tokens_per_round > 2


def test_a_second_turn_and_a_chunked_prompt_can_be_drafted_for(llama: PreTrainedModel, tmp_path: Path) -> None:
    folder, tensors = write(tmp_path, "medusa1")
    text = plain(llama, prompt(9), 20)
    first = llama.generate(prompt(9), max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    key = _compat.cache_key(llama)
    for given in ({key: first[key]}, {"prefill_chunk_size": 4}):
        drafter = Checked(hf_treespec.load_drafter(folder, target=llama), tensors, llama, text)
        spec = {"drafter": drafter, "fallback": False}
        ids = torch.tensor([text[:15]])
        out = llama.generate(ids, max_new_tokens=14, do_sample=False, tree_spec=spec, **given)
        assert out[0].tolist() == text and len(drafter.trees) >= 4


# -------------------------------------------------------------------- fixed trees


def test_the_published_list_of_paths_can_be_drafted(llama: PreTrainedModel, tmp_path: Path) -> None:
    folder, tensors = write(tmp_path, "medusa1")
    drafter = hf_treespec.load_drafter(folder, target=llama, tree=PUBLISHED)
    tree = drafts(drafter, llama, max_nodes=63, max_children=10)
    ranked = slow_log_q(tensors, llama, plain(llama, prompt(9), 1)).sort(dim=-1, descending=True)
    expected = {
        tuple(int(ranked.indices[d, rank]) for d, rank in enumerate(path)): sum(
            float(ranked.values[d, rank]) for d, rank in enumerate(path)
        )
        for path in PUBLISHED
    }
    found = {tuple(tree.tokens[0, tree.path(n)[1:]].tolist()): float(tree.scores[0, n]) for n in range(1, len(tree))}
    assert found.keys() == expected.keys()
    for path, score in expected.items():
        assert found[path] == pytest.approx(torch.tensor(score).exp().item(), abs=1e-5)


def test_fixed_trees_are_cut_to_the_budget(llama: PreTrainedModel, tmp_path: Path) -> None:
    drafter = hf_treespec.load_drafter(write(tmp_path, "medusa1")[0], target=llama, tree=PUBLISHED)
    whole = drafts(drafter, llama, max_nodes=63, max_children=10)
    few = drafts(drafter, llama, max_nodes=9, max_children=10)
    assert sorted(few.scores[0]) == pytest.approx(sorted(whole.scores[0])[-10:])
    narrow = drafts(drafter, llama, max_nodes=63, max_depth=2, max_children=2)
    assert len(narrow) == 7 and narrow.depths.max() == 2


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ([], "must be a list of paths"),
        ("0", "must be a list of paths"),
        ([[0], []], "must be a list of paths"),
        ([[0], [-1]], "must be a list of paths"),
        ([[0], [True]], "must be a list of paths"),
        ([0, 1], "must be a list of paths"),
        ([[0], [1, 0]], r"the path \[1, 0\] lacks the path \[1\]"),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], r"\[0, 0, 0, 0\] is deeper than the 3 heads"),
    ],
)
def test_lists_that_are_no_trees_are_named(tree: Any, says: str) -> None:
    with pytest.raises(DrafterError, match=says):
        MedusaDrafter(MedusaHeads(H, heads=3), tree=tree)


# -------------------------------------------------------------------- targets


@pytest.mark.parametrize("kind", ["packed", "nf4", "tied"])
def test_heads_end_in_whatever_the_targets_lm_head_is(kind: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    folder, tensors = write(tmp_path, "medusa1_tied")
    target = copy.deepcopy(llama)
    packed = None
    if kind == "packed":
        packed = hf_treespec.pack(target)
    elif kind == "tied":
        target.lm_head.weight = target.model.embed_tokens.weight
    else:
        bnb = pytest.importorskip("bitsandbytes")
        weight = target.lm_head.weight.data
        wide = torch.nn.functional.pad(weight, (0, 0, 0, 3))  # rows that fill whole blocks
        layer = bnb.nn.Linear4bit(H, len(wide), bias=False, compute_dtype=torch.float32, quant_type="nf4")
        layer.weight = bnb.nn.Params4bit(wide, requires_grad=False, quant_type="nf4")
        target.lm_head = layer.to("cpu")
        target.config.vocab_size = len(wide)
    loaded = hf_treespec.load_drafter(folder, target=target)
    drafter = Checked(loaded, tensors, target, plain(target, prompt(7), 10))
    spec = {"drafter": drafter, "max_nodes": 8, "fallback": False}
    try:
        out = target.generate(prompt(7), tree_spec=spec, max_new_tokens=10, do_sample=False)
        assert out[0].tolist() == drafter.text
        assert sum(len(tree) > 4 for _, tree in drafter.trees) >= 3
    finally:
        if packed is not None:
            packed.unpack()


def test_weights_take_the_targets_dtype(llama: PreTrainedModel, tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "medusa1")
    drafter = hf_treespec.load_drafter(folder, target=llama)
    assert {p.dtype for p in drafter.heads.parameters()} == {torch.float32}
    half = copy.deepcopy(llama).to(torch.bfloat16)
    with pytest.raises(DrafterError, match="load it once more"):
        half.generate(prompt(5), max_new_tokens=4, tree_spec=drafter)
    later = hf_treespec.load_drafter(folder)
    assert {p.dtype for p in later.heads.parameters()} == {torch.float16}
    half.generate(prompt(5), max_new_tokens=4, tree_spec={"drafter": later, "fallback": False})
    assert {p.dtype for p in later.heads.parameters()} == {torch.bfloat16}


# -------------------------------------------------------------------- files


def test_inspect_says_what_it_found(tmp_path: Path) -> None:
    found = hf_treespec.inspect_checkpoint(write(tmp_path, "medusa1")[0])
    assert found.format == "medusa" and found.files == ["medusa_lm_head.pt"]
    assert found.facts == {
        "layout": "Medusa-1",
        "target": "someone/llama",
        "heads": 5,
        "layers of a head": 1,
        "target's hidden size": H,
        "target's vocabulary": VOCAB,
        "target's states it reads": "the last, after the norm",
        "taken from the target": [],
        "heads by the config": 2,
    }
    json.dumps(found.to_dict())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_are_counted_in_the_file(layout: str, tmp_path: Path) -> None:
    facts = hf_treespec.inspect_checkpoint(write(tmp_path, layout)[0]).facts
    assert facts["heads"] == LAYOUTS[layout] and facts["layers of a head"] == (3 if "deep" in layout else 1)
    assert (facts["taken from the target"] == ["lm_head"]) == ("tied" in layout)
    assert facts["layout"] == ("Medusa-2" if layout == "medusa2" else "Medusa-1")


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_wrong_tensors_are_named(prefix: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = blocks(3, 1, own=True, prefix=prefix)
    del tensors[f"{prefix}1.0.linear.bias"], tensors[f"{prefix}2.1.weight"]
    tensors[f"{prefix}0.0.surprise"], tensors[f"{prefix}0.0.linear.bias"] = rand(2), rand(H + 1)
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    for action in (
        lambda: hf_treespec.load_drafter(tmp_path, target=llama),
        lambda: hf_treespec.inspect_checkpoint(tmp_path),
    ):
        with pytest.raises(CheckpointError) as error:
            action()
        assert f"missing {prefix}1.0.linear.bias (32,)" in str(error.value)
        assert f"missing {prefix}2.1.weight (61, 32)" in str(error.value)
        assert f"unexpected {prefix}0.0.surprise (2,)" in str(error.value)
        assert f"{prefix}0.0.linear.bias is (33,) instead of (32,)" in str(error.value)


@pytest.mark.parametrize(
    ("heads", "says"),
    [
        (MedusaHeads(48, 2), "hidden size of 48.* has 32"),
        (MedusaHeads(H, 2, vocab_size=99), "vocabulary of 99.* has 61"),
    ],
)
def test_another_targets_head_is_refused(heads: MedusaHeads, says: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    save_file({n: t.contiguous() for n, t in heads.state_dict().items()}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(DrafterError, match=says):
        hf_treespec.load_drafter(tmp_path, target=llama)
    with pytest.raises(DrafterError, match=says):  # without a target it is checked at the first call
        llama.generate(prompt(5), max_new_tokens=4, tree_spec=hf_treespec.load_drafter(tmp_path))


def test_options_and_bare_names_are_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "medusa1_tied")
    with pytest.raises(CheckpointError, match=r"does not take options.*wave"):
        hf_treespec.load_drafter(folder, target=llama, wave=3)
    with pytest.raises(DrafterError, match=r"needs trained heads.*load_drafter"):
        llama.generate(prompt(5), max_new_tokens=4, tree_spec="medusa")
