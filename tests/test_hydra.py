"""Hydra heads: random checkpoints in the reference's layout, against a slow recomputation that shares nothing with them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, output_that_knows, plain, prompt
from safetensors.torch import save_file
from torch.nn.functional import silu
from transformers import PreTrainedModel

import hf_treespec
from hf_treespec import Budget, CheckpointError, DraftContext, DrafterError, HydraDrafter, TokenTree, _compat
from hf_treespec.drafters.hydra import HydraHeads

H, HEADS, KV, SIZE, INNER = 32, 4, 2, 8, 40
Tensors = dict[str, torch.Tensor]
LAYER = "prefix_embeding_layer.layers.0."


def rand(*shape: int, scale: float = 0.3) -> torch.Tensor:
    return (torch.randn(*shape) * scale).half()


def mlp(heads: int, layers: int, grounded: bool, dropout: bool = False) -> Tensors:
    """`hydra_mlp` and `hydra_lm_head` as `state_dict` names them: dropouts count as parts of a head."""
    found: Tensors = {"input_embed_fn.weight": rand(VOCAB, H)}
    for i in range(heads):
        wide = (i + 2) * H if grounded else H
        later = rand(H, H), rand(H)  # one module in training: all blocks but the first share their numbers
        for j in range(layers):
            name = f"hydra_mlp.{i}.{2 * j + 1 if dropout else j}"
            if j == 0 and grounded:
                found[f"{name}.linear.weight"], found[f"{name}.linear.bias"] = rand(H, wide), rand(H)
                found[f"{name}.res_connection.weight"], found[f"{name}.res_connection.bias"] = rand(H, wide), rand(H)
            else:
                found[f"{name}.linear.weight"], found[f"{name}.linear.bias"] = later[0].clone(), later[1].clone()
        output = f"hydra_lm_head.{i}.1" if dropout else f"hydra_lm_head.{i}"
        found[f"{output}.weight"], found[f"{output}.bias"] = rand(VOCAB, H), rand(VOCAB)
    return found


def prefix(rotary: bool) -> Tensors:
    """A `LlamaModel` of one layer with its unused embeddings; old releases saved the rotary frequencies."""
    found = {
        "prefix_embeding_layer.embed_tokens.weight": rand(VOCAB, H),
        "prefix_embeding_layer.norm.weight": 1 + rand(H, scale=0.1),
        f"{LAYER}input_layernorm.weight": 1 + rand(H, scale=0.1),
        f"{LAYER}post_attention_layernorm.weight": 1 + rand(H, scale=0.1),
        f"{LAYER}self_attn.q_proj.weight": rand(HEADS * SIZE, H),
        f"{LAYER}self_attn.k_proj.weight": rand(KV * SIZE, H),
        f"{LAYER}self_attn.v_proj.weight": rand(KV * SIZE, H),
        f"{LAYER}self_attn.o_proj.weight": rand(H, HEADS * SIZE),
        f"{LAYER}mlp.gate_proj.weight": rand(INNER, H),
        f"{LAYER}mlp.up_proj.weight": rand(INNER, H),
        f"{LAYER}mlp.down_proj.weight": rand(H, INNER),
    }
    if rotary:
        found[f"{LAYER}self_attn.rotary_emb.inv_freq"] = (10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)).half()
    return found


def checkpoint(layout: str) -> tuple[dict[str, Any], Tensors]:
    config: dict[str, Any] = {"base_model_name_or_path": "someone/llama", "hidden_state_offset": 0}
    kind = {
        "hydra_head_arch": "prefix-mlp" if "prefix" in layout else "mlp",
        "grounded_heads": "ungrounded" not in layout,
    }
    tensors = {
        "mlp": lambda: mlp(4, 2, True),
        "mlp_offset": lambda: mlp(3, 1, True),
        "mlp_ungrounded": lambda: mlp(3, 1, False),
        "prefix": lambda: mlp(4, 3, True, dropout=True) | prefix(rotary=True),
        "prefix_new": lambda: mlp(3, 1, True, dropout=True) | prefix(rotary=False),
        "prefix_ungrounded": lambda: mlp(3, 2, False, dropout=True) | prefix(rotary=True),
    }[layout]()
    if layout == "mlp_offset":
        config["hidden_state_offset"] = 1
    count = sum(name.startswith("hydra_lm_head") for name in tensors) // 2
    return {**config, **kind, "hydra_num_heads": count, "hydra_num_layers": 1}, tensors


LAYOUTS = ("mlp", "mlp_offset", "mlp_ungrounded", "prefix", "prefix_new", "prefix_ungrounded")


def write(folder: Path, layout: str, seed: int = 0) -> tuple[Path, Tensors]:
    torch.manual_seed(seed)
    config, tensors = checkpoint(layout)
    (folder / "config.json").write_text(json.dumps(config))
    if layout == "prefix_new":
        save_file(tensors, folder / "hydra_lm_head.safetensors")
    else:
        torch.save(tensors, folder / "hydra_lm_head.pt")
    return folder, {name: tensor.float() for name, tensor in tensors.items()}


class Slow:
    """The heads by hand: no cache, no modules, one path at a time, everything recomputed for each node."""

    def __init__(self, layout: str, tensors: Tensors, target: PreTrainedModel) -> None:
        self.w, self.target, self.state = tensors, target, -2 if layout == "mlp_offset" else -1
        self.prefix = "prefix" in layout
        self.base = target.config.rope_parameters["rope_theta"] if layout == "prefix_new" else 10000.0
        self.heads = sum(name.startswith("hydra_lm_head") for name in tensors) // 2
        self.grounded = "ungrounded" not in layout

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.target.config.rms_norm_eps).sqrt() * self.w[f"{name}.weight"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        angles = (torch.arange(x.shape[1])[:, None] * self.base ** (-torch.arange(0, SIZE, 2) / SIZE)).repeat(1, 2)
        return x * angles.cos() + torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1) * angles.sin()

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        n, y = len(x), self.norm(f"{LAYER}input_layernorm", x)
        q, k, v = (self.linear(f"{LAYER}self_attn.{m}_proj", y).view(n, -1, SIZE).transpose(0, 1) for m in "qkv")
        q, k, v = self.rope(q), self.rope(k).repeat_interleave(HEADS // KV, 0), v.repeat_interleave(HEADS // KV, 0)
        scores = q @ k.transpose(1, 2) / SIZE**0.5 + torch.full((n, n), -torch.inf).triu(1)
        x = x + self.linear(f"{LAYER}self_attn.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1))
        y = self.norm(f"{LAYER}post_attention_layernorm", x)
        gate = silu(self.linear(f"{LAYER}mlp.gate_proj", y)) * self.linear(f"{LAYER}mlp.up_proj", y)
        return self.norm("prefix_embeding_layer.norm", x + self.linear(f"{LAYER}mlp.down_proj", gate))

    @torch.no_grad()
    def log_q(self, ids: list[int], path: list[int]) -> torch.Tensor:
        """(V,) log q of what follows the text `ids` and then `path`."""
        states = self.target(torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
        x, i = states[self.state][0], len(path)
        x = (self.layer(x) if self.prefix else x)[-1]
        if self.grounded:
            x = torch.cat([x, *self.target.model.embed_tokens.weight[[ids[-1], *path]]])
        for j in itertools.count():
            name = f"hydra_mlp.{i}.{2 * j + 1 if self.prefix else j}"
            if f"{name}.linear.weight" not in self.w:
                break
            residual = self.linear(f"{name}.res_connection", x) if f"{name}.res_connection.weight" in self.w else x
            x = residual + silu(self.linear(f"{name}.linear", x))
        return self.linear(f"hydra_lm_head.{i}.1" if self.prefix else f"hydra_lm_head.{i}", x).log_softmax(-1)


class Checked(HydraDrafter):
    """Checks every tree, then adds 0, 1, 2, … true next tokens, so that rounds accept that many."""

    def __init__(self, inner: HydraDrafter, slow: Slow, text: list[int], pad: int = 0) -> None:
        self.__dict__.update(inner.__dict__)
        self.slow, self.text, self.pad = slow, text, pad
        self.trees: list[tuple[list[int], TokenTree]] = []

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        tree = super().draft(context, budget)
        tree.check(VOCAB)
        ids = context.ids[0].tolist()
        for node in range(1, len(tree)):
            path = tree.tokens[0, tree.path(node)[1:]].tolist()
            score = sum(float(self.slow.log_q(ids[self.pad :], path[:i])[token]) for i, token in enumerate(path))
            assert tree.scores[0, node] == pytest.approx(torch.tensor(score).exp().item(), abs=1e-4)
        self.trees.append((ids, tree))
        return tree.merge(TokenTree.chain(ids[-1], self.text[len(ids) : len(ids) + len(self.trees) % 4]))


class Watched(HydraDrafter):
    """Keeps what it drafted."""

    def __init__(self, inner: HydraDrafter) -> None:
        self.__dict__.update(inner.__dict__)
        self.trees: list[tuple[DraftContext, TokenTree]] = []
        self.draws: list[list[torch.Tensor]] = []
        self.ran: list[int] = []

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        self.trees.append((context, super().draft(context, budget)))
        self.ran.append(self.forwards)
        if context.noise is not None:
            self.draws.append([context.noise.peek(d)[0].clone() for d in range(2)])
        return self.trees[-1][1]


# -------------------------------------------------------------------- what is drafted


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padded", [False, True])
def test_drafts_are_the_slow_heads(layout: str, padded: bool, llama: PreTrainedModel, tmp_path: Path) -> None:
    """Every node of every round, after none, some and all of a path were accepted; and a drafter that starts on the
    text so far drafts the same."""
    folder, tensors = write(tmp_path, layout)
    options = {} if "ungrounded" in layout else {"min_gain": 0.0}
    loaded = hf_treespec.load_drafter(folder, target=llama, wave=4, **options)
    assert isinstance(loaded, HydraDrafter)
    ids, pad = prompt(7), 3 if padded else 0
    text = [0] * pad + plain(llama, ids, 24)
    given: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
    if padded:
        given["attention_mask"] = torch.tensor([[0] * pad + [1] * 7])
        ids = torch.cat([torch.zeros(1, pad, dtype=torch.long), ids], 1)
    drafter = Checked(loaded, Slow(layout, tensors, llama), text, pad)
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
            again = fresh.trees[0][1]
            assert again.tokens.tolist() == tree.tokens.tolist() and again.parents.tolist() == tree.parents.tolist()
            assert again.scores[0].tolist() == pytest.approx(tree.scores[0].tolist(), abs=1e-4)


def test_each_head_runs_once_over_the_best_nodes_of_its_depth(llama: PreTrainedModel, tmp_path: Path) -> None:
    drafter = hf_treespec.load_drafter(write(tmp_path, "mlp")[0], target=llama, wave=3, min_gain=0.0)
    rows: list[tuple[int, int]] = []
    for i, head in enumerate(drafter.heads.hydra_lm_head):
        head.register_forward_hook(lambda module, given, out, i=i: rows.append((i, len(out))))
    watched = Watched(drafter)
    spec = {"drafter": watched, "fallback": False, "max_nodes": 20, "max_depth": 9}
    llama.generate(prompt(9), max_new_tokens=12, do_sample=False, tree_spec=spec)
    assert rows[:4] == [(0, 1), (1, 3), (2, 3), (3, 3)]
    assert watched.ran[0] == 4 and watched.trees[0][1].depths.max() <= 4
    eager, thrifty = watched, Watched(drafter)
    thrifty.min_gain = 1.0
    llama.generate(prompt(9), max_new_tokens=12, do_sample=False, tree_spec={**spec, "drafter": thrifty})
    assert thrifty.ran[0] < eager.ran[0]


@pytest.mark.parametrize("layout", ["prefix", "mlp_ungrounded"])
def test_sampled_children_follow_the_targets_noise(layout: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    """The first child of the root, and its first child, are the argmax of log q + g at their depth."""
    folder, tensors = write(tmp_path, layout)
    drafter = Watched(hf_treespec.load_drafter(folder, target=llama, min_gain=0.0))
    slow, full = Slow(layout, tensors, llama), 0
    spec = {"drafter": drafter, "fallback": False, "max_children": 1, "max_depth": 2}
    llama.generate(prompt(6), max_new_tokens=9, do_sample=True, temperature=0.7, top_k=0, tree_spec=spec)
    for (context, tree), draws in zip(drafter.trees, drafter.draws, strict=True):
        path: list[int] = []
        for draw in draws[: len(tree) - 1]:
            scores = slow.log_q(context.ids[0].tolist(), path[:1]) / 0.7
            path.append(int((scores - draw.log()).argmax()))
        assert tree.tokens[0, 1:].tolist() == path
        full += len(tree) == 3
    assert full >= 4


@pytest.mark.parametrize("layout", ["mlp", "prefix_ungrounded"])
def test_fixed_trees_have_their_shape(layout: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    folder, tensors = write(tmp_path, layout)
    shape = [[0], [1], [4], [0, 0], [0, 2], [4, 1], [0, 2, 0]]
    watched = Watched(hf_treespec.load_drafter(folder, target=llama, tree=shape))
    spec = {"drafter": watched, "fallback": False, "max_children": 5}
    llama.generate(prompt(9), max_new_tokens=9, do_sample=False, tree_spec=spec)
    context, tree = watched.trees[0]
    slow, expected = Slow(layout, tensors, llama), set()
    for ranks in shape:
        path: list[int] = []
        for rank in ranks:
            path.append(int(slow.log_q(context.ids[0].tolist(), path).topk(rank + 1).indices[-1]))
        expected.add(tuple(path))
    assert {tuple(tree.tokens[0, tree.path(n)[1:]].tolist()) for n in range(1, len(tree))} == expected
    assert watched.ran[0] == 3


def test_good_heads_save_rounds_and_the_text_is_plain_decodings(llama: PreTrainedModel) -> None:
    text = plain(llama, prompt(9), 24)
    heads = HydraHeads(H, VOCAB, heads=3)
    for i in range(3):
        first, output = heads.hydra_mlp[i][0], heads.hydra_lm_head[i]
        for parameter in (*first.parameters(), output.bias):
            torch.nn.init.zeros_(parameter)
        first.res_connection.weight.data[:, :H] = torch.eye(H)
        output.weight.data = output_that_knows(llama, text, i + 1)
    spec = {"drafter": HydraDrafter(heads), "fallback": False}
    given: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    out = llama.generate(prompt(9), tree_spec=spec, **given)
    assert out.sequences[0].tolist() == text and out.tree_spec.tokens_per_round > 3
    hf_treespec.check_drafter(HydraDrafter(heads), llama, prompts=[prompt(9)])


@pytest.mark.parametrize("layout", ["prefix", "prefix_ungrounded"])
def test_the_text_is_plain_decodings_with_a_prefix_layer(layout: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    drafter = hf_treespec.load_drafter(write(tmp_path, layout)[0], target=llama)
    hf_treespec.check_drafter(drafter, llama, max_new_tokens=10, prompts=[prompt(9), prompt(5, seed=1)])
    embeds = llama.get_input_embeddings()(prompt(9)).detach()
    text = llama.generate(inputs_embeds=embeds, max_new_tokens=10, do_sample=False)
    spec = {"drafter": drafter, "fallback": False}
    assert torch.equal(text, llama.generate(inputs_embeds=embeds, max_new_tokens=10, do_sample=False, tree_spec=spec))
    first = llama.generate(prompt(9), max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    key, turn = _compat.cache_key(llama), torch.cat([first.sequences, prompt(4, seed=2)], 1)
    text = llama.generate(turn, max_new_tokens=10, do_sample=False)
    for given in ({key: first[key]}, {"prefill_chunk_size": 4}):  # what came before is not known to the layer
        out = llama.generate(turn, max_new_tokens=10, do_sample=False, tree_spec=spec, **given)
        assert torch.equal(text, out)


@pytest.mark.parametrize("prompt_is_read", [True, False])
def test_rounds_without_a_draft_are_read_too(
    prompt_is_read: bool, llama: PreTrainedModel, tmp_path: Path, plain_until: Callable[[int], None]
) -> None:
    if not prompt_is_read:
        plain_until(40)
    folder, tensors = write(tmp_path, "prefix")
    inner = hf_treespec.load_drafter(folder, target=llama)

    class Lazy(Checked):
        def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
            if context.ids.shape[1] < 40:
                return TokenTree.root_only(context.last_token)
            return super().draft(context, budget)

    lazy = Lazy(inner, Slow("prefix", tensors, llama), plain(llama, prompt(5), 48))
    llama.generate(prompt(5), max_new_tokens=48, do_sample=False, tree_spec={"drafter": lazy, "fallback": False})
    assert len(lazy.trees) >= 3


def test_rotary_frequencies_are_not_rounded(llama: PreTrainedModel, tmp_path: Path) -> None:
    import copy

    half = copy.deepcopy(llama).to(torch.bfloat16)
    layer = hf_treespec.load_drafter(write(tmp_path, "prefix")[0], target=half).heads.prefix_embeding_layer
    expected = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    assert layer.norm.weight.dtype == torch.bfloat16
    assert torch.allclose(layer.rotary_emb.inv_freq, expected, rtol=1e-6)


# -------------------------------------------------------------------- files


def test_inspect_says_what_it_found(tmp_path: Path) -> None:
    found = hf_treespec.inspect_checkpoint(write(tmp_path, "prefix")[0])
    assert found.format == "hydra" and found.files == ["hydra_lm_head.pt"]
    assert found.facts == {
        "layout": "prefix-mlp",
        "target": "someone/llama",
        "heads": 4,
        "layers of a head": 3,
        "grounded": True,
        "target's hidden size": H,
        "target's vocabulary": VOCAB,
        "target's states it reads": "the last, after the norm",
        "taken from the target": ["embed_tokens"],
    }
    json.dumps(found.to_dict())


def test_the_state_that_is_read_is_told(tmp_path: Path) -> None:
    facts = hf_treespec.inspect_checkpoint(write(tmp_path, "mlp_offset")[0]).facts
    assert facts["layout"] == "mlp" and facts["target's states it reads"] == "the one that is 1 before the last"


@pytest.mark.parametrize("architecture", ["eagle-attn", "cross-attn"])
def test_other_architectures_are_refused_by_name(architecture: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    names = ("fc.weight", "attn.self_attn.q_proj.weight") if "eagle" in architecture else ("cross_attn.q_proj.weight",)
    torch.save({name: rand(H, H) for name in (*names, "input_embed_fn.weight")}, tmp_path / "hydra_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps({"hydra_head_arch": architecture}))
    with pytest.raises(DrafterError, match=f"'{architecture}', which is not supported"):
        hf_treespec.load_drafter(tmp_path, target=llama)
    found = hf_treespec.inspect_checkpoint(tmp_path)
    assert found.format == "hydra" and found.facts["layout"] == f"{architecture}, which is not supported"


def rewritten(folder: Path, layout: str, change: Any) -> Path:
    torch.manual_seed(0)
    config, tensors = checkpoint(layout)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "hydra_lm_head.pt")
    return folder


def test_wrong_tensors_are_named(llama: PreTrainedModel, tmp_path: Path) -> None:
    def change(config: Any, tensors: Tensors) -> None:
        del (
            tensors["hydra_mlp.1.3.linear.bias"],
            tensors["hydra_lm_head.3.1.weight"],
            tensors[f"{LAYER}mlp.up_proj.weight"],
        )
        tensors["surprise"], tensors["hydra_mlp.2.1.linear.weight"] = rand(2), rand(H, 2 * H)

    folder = rewritten(tmp_path, "prefix", change)
    for action in (
        lambda: hf_treespec.load_drafter(folder, target=llama),
        lambda: hf_treespec.inspect_checkpoint(folder),
    ):
        with pytest.raises(CheckpointError) as error:
            action()
        for says in (
            "missing hydra_mlp.1.3.linear.bias (32,)",
            "missing hydra_lm_head.3.1.weight (61, 32)",
            f"missing {LAYER}mlp.up_proj.weight (40, 32)",
            "unexpected surprise (2,)",
            "hydra_mlp.2.1.linear.weight is (32, 64) instead of (32, 128)",
        ):
            assert says in str(error.value)


def test_files_that_cannot_be_understood(llama: PreTrainedModel, tmp_path: Path) -> None:
    def rotated(config: Any, tensors: Tensors) -> None:
        tensors[f"{LAYER}self_attn.rotary_emb.inv_freq"] *= 2

    with pytest.raises(CheckpointError, match="inv_freq are not the frequencies of base 10000"):
        hf_treespec.load_drafter(rewritten(tmp_path, "prefix", rotated), target=llama)
    folder = rewritten(tmp_path, "mlp", lambda config, tensors: config.update(hidden_state_offset=-1))
    with pytest.raises(CheckpointError, match="hidden_state_offset=-1"):
        hf_treespec.load_drafter(folder, target=llama)
    folder = rewritten(tmp_path, "mlp", lambda config, tensors: config.update(hidden_state_offset=4))
    with pytest.raises(DrafterError, match=r"after layer 4.* has 2"):
        llama.generate(prompt(5), max_new_tokens=3, tree_spec=hf_treespec.load_drafter(folder))


@pytest.mark.parametrize("grounded", [True, False])
@pytest.mark.parametrize(
    ("sizes", "says"), [((48, VOCAB), "hidden size of 48.* has 32"), ((H, 99), "vocabulary of 99.* has 61")]
)
def test_another_targets_head_is_refused(
    sizes: tuple[int, int], says: str, grounded: bool, llama: PreTrainedModel, tmp_path: Path
) -> None:
    torch.save(HydraHeads(*sizes, heads=2, grounded=grounded).state_dict(), tmp_path / "hydra_lm_head.pt")
    with pytest.raises(DrafterError, match=says):
        hf_treespec.load_drafter(tmp_path, target=llama)
    with pytest.raises(DrafterError, match=says):  # without a target it is checked at the first call
        llama.generate(prompt(5), max_new_tokens=4, tree_spec=hf_treespec.load_drafter(tmp_path))


def test_another_targets_prefix_layer_is_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    def change(rows: int) -> Any:
        return lambda config, tensors: tensors.update({f"{LAYER}self_attn.q_proj.weight": rand(rows, H)})

    with pytest.raises(CheckpointError, match=r"o_proj.weight is \(32, 32\) instead of \(32, 64\)"):
        hf_treespec.load_drafter(rewritten(tmp_path, "prefix", change(64)), target=llama)
    with pytest.raises(CheckpointError, match=r"q_proj.weight has 36 rows, which are no attention heads of 8"):
        hf_treespec.load_drafter(rewritten(tmp_path, "prefix", change(36)), target=llama)
    with pytest.raises(DrafterError, match=r"pass load_drafter.*target=model"):
        hf_treespec.load_drafter(write(tmp_path, "prefix")[0])


def test_options_and_bare_names_are_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "mlp")
    for options, says in (
        ({"wave": 0}, "wave=0"),
        ({"min_gain": 2.0}, "min_gain=2.0"),
        ({"tree": [[0, 0]]}, r"lacks the path \[0\]"),
        ({"nodes": 3}, "does not take options"),
    ):
        with pytest.raises(DrafterError, match=says):
            hf_treespec.load_drafter(folder, target=llama, **options)
    with pytest.raises(DrafterError, match=r"needs trained heads.*load_drafter"):
        llama.generate(prompt(5), max_new_tokens=4, tree_spec="hydra")
