"""EAGLE heads: random checkpoints in the public layouts, against a slow recomputation that shares nothing with the head."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import LLAMA, VOCAB, build, plain, prompt, target
from safetensors.torch import save_file
from torch.nn.functional import silu
from transformers import PreTrainedModel

import hf_treespec
from hf_treespec import Budget, CheckpointError, DraftContext, DrafterError, EagleDrafter, TokenTree, cli
from hf_treespec.drafters.head import taps
from hf_treespec.packing import can_pack
from hf_treespec.verify import Verified

H, HEADS, KV, SIZE, INNER, DRAFTED = 32, 4, 2, 8, 40, 40
LAYER = {
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": SIZE,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
}


@pytest.fixture(scope="module")
def deep() -> PreTrainedModel:
    """A target of six layers, so that three different states can be tapped."""
    import conftest

    before = dict(conftest.LLAMA)
    conftest.LLAMA["num_hidden_layers"] = 6
    try:
        return build("llama")
    finally:
        conftest.LLAMA.update(before)


def rand(*shape: int, scale: float = 0.4) -> torch.Tensor:
    return (torch.randn(*shape) * scale).half()


def layer_tensors(prefix: str, width: int, *, qk_norm: bool = False, first: bool = True) -> dict[str, torch.Tensor]:
    found = {
        "self_attn.q_proj.weight": rand(HEADS * SIZE, width),
        "self_attn.k_proj.weight": rand(KV * SIZE, width),
        "self_attn.v_proj.weight": rand(KV * SIZE, width),
        "self_attn.o_proj.weight": rand(H, HEADS * SIZE),
        "mlp.gate_proj.weight": rand(INNER, H),
        "mlp.up_proj.weight": rand(INNER, H),
        "mlp.down_proj.weight": rand(H, INNER),
        "post_attention_layernorm.weight": 1 + rand(H, scale=0.1),
    }
    if width == 2 * H:
        found |= {"input_layernorm.weight": 1 + rand(H, scale=0.1), "hidden_norm.weight": 1 + rand(H, scale=0.1)}
    if not first:
        found["input_layernorm.weight"] = 1 + rand(H, scale=0.1)
    if qk_norm:
        found |= {f"self_attn.{n}.weight": 1 + rand(SIZE, scale=0.1) for n in ("q_norm", "k_norm")}
    return {prefix + name: tensor for name, tensor in found.items()}


def draft_vocabulary() -> dict[str, torch.Tensor]:
    chosen = torch.randperm(VOCAB)[:DRAFTED].sort().values
    return {
        "d2t": chosen - torch.arange(DRAFTED),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True),
        "lm_head.weight": rand(DRAFTED, H),
    }


def eagle1() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    tensors = {"fc.weight": rand(H, 2 * H), "fc.bias": rand(H), "embed_tokens.weight": rand(VOCAB, H)}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LAYER}, tensors | layer_tensors(
        "layers.0.", H
    )


def eagle2_qwen() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """No bias on fc, biases on q, k, v, the target's embeddings."""
    tensors = {"fc.weight": rand(H, 2 * H)} | layer_tensors("layers.0.", H)
    tensors |= {f"layers.0.self_attn.{n}_proj.bias": rand(KV * SIZE if n != "q" else HEADS * SIZE) for n in "qkv"}
    config = {"architectures": ["LlamaForCausalLM"], "bias": False, "qkv_bias": True, **LAYER, "rope_theta": 5000.0}
    return config, tensors


def specforge() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    tensors = {"fc.weight": rand(H, 3 * H), "norm.weight": 1 + rand(H, scale=0.1)}
    tensors |= layer_tensors("midlayer.", 2 * H) | draft_vocabulary()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFTED, **LAYER}
    return config, tensors


def modelopt() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`layers.0`, no draft vocabulary, the target's lm_head, fc_norm and norm_output of 3.1, nested taps."""
    tensors = {"fc.weight": rand(H, 3 * H), "norm.weight": 1 + rand(H, scale=0.1)} | layer_tensors("layers.0.", 2 * H)
    tensors |= {f"fc_norm.{i}.weight": 1 + rand(H, scale=0.1) for i in range(3)}
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": ids, "norm_output": True, **LAYER}
    return {**config, "rope_scaling": None}, tensors


def speculators() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Qwen3 layers, two of them, norms before fc and before the residual, its own embeddings."""
    tensors = {
        "fc.weight": rand(H, 3 * H),
        "norm.weight": 1 + rand(H, scale=0.1),
        "embed_tokens.weight": rand(VOCAB, H),
    }
    tensors |= layer_tensors("layers.0.", 2 * H, qk_norm=True)
    tensors |= layer_tensors("layers.1.", H, qk_norm=True, first=False)
    tensors |= draft_vocabulary() | {
        "input_norm.weight": 1 + rand(3 * H, scale=0.1),
        "verifier_lm_head.weight": rand(1, H),
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": DRAFTED,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "someone/llama"}},
        "transformer_layer_config": {"model_type": "qwen3", **LAYER, "num_hidden_layers": 2, "rope_theta": 500.0},
    }
    return config, tensors


LAYOUTS = {f.__name__: f for f in (eagle1, eagle2_qwen, specforge, modelopt, speculators)}
TAPS = {"eagle1": (6,), "eagle2_qwen": (6,), "specforge": (2, 3, 3), "modelopt": (1, 3, 5), "speculators": (1, 3, 5)}


def write(folder: Path, layout: str, seed: int = 0) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    config, tensors = LAYOUTS[layout]()
    (folder / "config.json").write_text(json.dumps(config))
    if layout == "eagle1":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif layout == "modelopt":  # sharded
        names = sorted(tensors)
        parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
        for file, inside in parts.items():
            save_file({n: tensors[n] for n in inside}, folder / file)
        index = {"weight_map": {n: file for file, inside in parts.items() for n in inside}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder, config, {name: tensor.float() for name, tensor in tensors.items()}


# -------------------------------------------------------------------- the slow head


class Slow:
    """One head by hand: no cache, no modules, one path at a time, everything recomputed at every step."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, torch.Tensor], target: PreTrainedModel, taps: Any
    ) -> None:
        self.target, self.taps, self.config = target, taps, config
        self.layer = config.get("transformer_layer_config", config)
        self.w = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
        self.eagle3 = "norm.weight" in self.w
        self.embed = self.w.get("embed_tokens.weight", target.get_input_embeddings().weight)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[name]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        """(heads, n, size), positions from 0."""
        frequencies = self.layer.get("rope_theta", 10000.0) ** (-torch.arange(0, SIZE, 2) / SIZE)
        angles = (torch.arange(x.shape[1])[:, None] * frequencies).repeat(1, 2)
        turned = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
        return x * angles.cos() + turned * angles.sin()

    def attention(self, p: str, x: torch.Tensor) -> torch.Tensor:
        n = len(x)
        q, k, v = (self.linear(f"{p}.{m}_proj", x).view(n, -1, SIZE).transpose(0, 1) for m in "qkv")
        if f"{p}.q_norm.weight" in self.w:
            q, k = self.norm(f"{p}.q_norm.weight", q), self.norm(f"{p}.k_norm.weight", k)
        q, k, v = self.rope(q), self.rope(k).repeat_interleave(HEADS // KV, 0), v.repeat_interleave(HEADS // KV, 0)
        scores = q @ k.transpose(1, 2) / SIZE**0.5 + torch.full((n, n), -torch.inf).triu(1)
        return self.linear(f"{p}.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1))

    def mlp(self, p: str, x: torch.Tensor) -> torch.Tensor:
        return self.linear(f"{p}.down_proj", silu(self.linear(f"{p}.gate_proj", x)) * self.linear(f"{p}.up_proj", x))

    def layers(self, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        e = self.embed[tokens]
        if self.eagle3:
            normed = self.norm("layers.0.hidden_norm.weight", states)
            x = torch.cat([self.norm("layers.0.input_layernorm.weight", e), normed], -1)
            out = self.attention("layers.0.self_attn", x)
            out = out + (normed if self.config.get("norm_before_residual") else states)
        else:
            x = self.linear("fc", torch.cat([e, states], -1))
            out = x + self.attention("layers.0.self_attn", x)
        out = out + self.mlp("layers.0.mlp", self.norm("layers.0.post_attention_layernorm.weight", out))
        if "layers.1.mlp.up_proj.weight" in self.w:
            x = self.norm("layers.1.input_layernorm.weight", out)
            out = out + self.attention("layers.1.self_attn", x)
            out = out + self.mlp("layers.1.mlp", self.norm("layers.1.post_attention_layernorm.weight", out))
        return out

    def fuse(self, ids: list[int]) -> torch.Tensor:
        states = self.target(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        parts = [states[layer][0] for layer in self.taps]
        if not self.eagle3:
            return parts[0]
        if "fc_norm.0.weight" in self.w:
            parts = [self.norm(f"fc_norm.{i}.weight", part) for i, part in enumerate(parts)]
        x = torch.cat(parts, -1)
        return self.linear("fc", self.norm("input_norm.weight", x) if "input_norm.weight" in self.w else x)

    @torch.no_grad()
    def log_q(self, ids: list[int], path: list[int]) -> torch.Tensor:
        """(V,) log q of what follows the text `ids` and then `path`; tokens that the head cannot draft have -inf."""
        states, tokens = self.fuse(ids[:-1]), ids[1:]
        for token in [*path, None]:
            out = self.layers(tokens, states)[-1:]
            normed = self.norm("norm.weight", out) if self.eagle3 else out
            if token is not None:
                states = torch.cat([states, normed if self.config.get("norm_output") else out])
                tokens = [*tokens, token]
        if "lm_head.weight" not in self.w:
            return self.target.get_output_embeddings()(normed)[0].log_softmax(-1)
        scores = torch.full((VOCAB,), -torch.inf)
        scores[torch.arange(DRAFTED) + self.w["d2t"].long()] = (normed @ self.w["lm_head.weight"].T)[0]
        return scores.log_softmax(-1)


class Checked(EagleDrafter):
    """Compares every tree with the slow head's, then has `accept` of the true next tokens drafted too, in turn 0, 1, 2, …

    The loop commits what the target says, so states of accepted paths and rejected nodes go through `observe`.
    """

    def __init__(self, inner: EagleDrafter, slow: Slow, text: list[int]) -> None:
        self.__dict__.update(inner.__dict__)
        self.slow, self.text, self.checked = slow, text, []

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        tree = super().draft(context, budget)
        tree.check(VOCAB)
        ids = context.ids[0].tolist()
        for node in range(1, len(tree)):
            path = tree.tokens[0, tree.path(node)[1:]].tolist()
            expected = sum(float(self.slow.log_q(ids, path[:i])[token]) for i, token in enumerate(path))
            assert tree.scores[0, node] == pytest.approx(torch.tensor(expected).exp().item(), abs=1e-4)
        self.checked.append(len(tree))
        ahead = self.text[len(ids) : len(ids) + len(self.checked) % 4]
        return tree.merge(TokenTree.chain(ids[-1], ahead))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padded", [False, True])
def test_drafts_are_the_slow_heads(layout: str, padded: bool, deep: PreTrainedModel, tmp_path: Path) -> None:
    """Scores of every node in every round, after none, some and all of a path were accepted: what a head that has just
    read the text from scratch says."""
    folder, config, tensors = write(tmp_path, layout)
    loaded = hf_treespec.load_drafter(folder, target=deep, wave=3, min_gain=0.0)
    assert isinstance(loaded, EagleDrafter)
    loaded._other = None  # which convention holds is another test
    loaded.hidden_layers = loaded.taps
    ids = prompt(7)
    text = plain(deep, ids, 16)
    drafter = Checked(loaded, Slow(config, tensors, deep, TAPS[layout]), text)
    given: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    if padded:
        given["attention_mask"] = torch.tensor([[0] * 3 + [1] * 7])
        ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
        drafter.text = [0, 0, 0, *text]
        drafter.slow.log_q = lambda ids, path, inner=drafter.slow.log_q: inner(ids[3:], path)  # type: ignore[method-assign]
    spec = {"drafter": drafter, "max_nodes": 10, "fallback": False, "debug": True}
    out = deep.generate(ids, tree_spec=spec, return_dict_in_generate=True, **given)
    assert out.sequences[0].tolist()[-16:] == text[-16:]
    assert sum(size > 5 for size in drafter.checked) >= 4
    accepted = {len(record.path) - 1 for record in out.tree_spec.records[1:]}
    assert accepted >= {0, 1} and max(accepted) >= 2


@pytest.mark.parametrize("layout", ["eagle1", "speculators"])
def test_the_text_is_plain_decodings(layout: str, deep: PreTrainedModel, tmp_path: Path) -> None:
    hf_treespec.check_drafter(
        hf_treespec.load_drafter(write(tmp_path, layout)[0], target=deep), deep, max_new_tokens=12, prompts=[prompt(9)]
    )


@pytest.mark.parametrize("prompt_is_read", [True, False])
def test_a_long_stretch_of_plain_decoding_is_read_too(
    prompt_is_read: bool, deep: PreTrainedModel, tmp_path: Path, plain_until: Callable[[int], None]
) -> None:
    """More unread pairs than one chain takes, after rounds in which nothing was drafted, or nobody was asked."""
    if not prompt_is_read:
        plain_until(80)
    folder, config, tensors = write(tmp_path, "specforge")
    drafter = hf_treespec.load_drafter(folder, target=deep, wave=2, min_gain=0.0)
    text = plain(deep, prompt(5), 90)
    slow = Slow(config, tensors, deep, TAPS["specforge"])
    trees = []

    class Lazy(EagleDrafter):
        def __init__(self) -> None:
            self.__dict__.update(drafter.__dict__)

        def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
            if context.ids.shape[1] < 80:
                return TokenTree.root_only(context.last_token)
            trees.append((context.ids[0].tolist(), super().draft(context, budget)))
            return trees[-1][1]

    out = deep.generate(prompt(5), max_new_tokens=90, do_sample=False, tree_spec={"drafter": Lazy(), "fallback": False})
    assert out[0].tolist() == text
    ids, tree = trees[0]
    expected = slow.log_q(ids, []).exp()
    for node in range(1, len(tree)):
        if tree.parents[0, node] == 0:
            assert tree.scores[0, node] == pytest.approx(float(expected[tree.tokens[0, node]]), abs=1e-4)


def test_sampled_children_follow_the_targets_noise(deep: PreTrainedModel, tmp_path: Path) -> None:
    """The first child is the argmax of log q + g over the tokens that the head can draft."""
    folder, config, tensors = write(tmp_path, "specforge")
    drafter = hf_treespec.load_drafter(folder, target=deep)
    slow, seen = Slow(config, tensors, deep, TAPS["specforge"]), []

    class Watch(EagleDrafter):
        def __init__(self) -> None:
            self.__dict__.update(drafter.__dict__)

        def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
            tree = super().draft(context, budget)
            scores = slow.log_q(context.ids[0].tolist(), []) / 0.7
            seen.append((int(tree.tokens[0, 1]), int((scores - context.noise.peek(0)[0].log()).argmax())))  # type: ignore[union-attr]
            return tree

    spec = {"drafter": Watch(), "fallback": False}
    deep.generate(prompt(6), max_new_tokens=8, do_sample=True, temperature=0.7, top_k=0, tree_spec=spec)
    assert len(seen) >= 4
    assert all(a == b for a, b in seen)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", LLAMA),
    "phi3": ("Phi3", LLAMA),
    "gpt_oss": ("GptOss", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
}


def of_family(family: str) -> PreTrainedModel:
    if family not in OTHERS:
        return target(family)
    name, options = OTHERS[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mixtral", "mistral", "gpt2", *OTHERS])
def test_targets_of_other_families(family: str, tmp_path: Path) -> None:
    """Embeddings, lm_head and states are found whatever a family calls them."""
    model = of_family(family)
    folder, config, tensors = write(tmp_path, "eagle2_qwen")
    loaded = hf_treespec.load_drafter(folder, target=model, min_gain=0.0)
    text = plain(model, prompt(8), 10)
    drafter = Checked(loaded, Slow(config, tensors, model, (-1,)), text)
    out = model.generate(
        prompt(8), max_new_tokens=10, do_sample=False, tree_spec={"drafter": drafter, "max_nodes": 6, "fallback": False}
    )
    assert out[0].tolist() == text
    assert len(drafter.checked) >= 3


def test_a_packed_target_lends_its_lm_head(llama: PreTrainedModel, tmp_path: Path) -> None:
    if not can_pack():
        pytest.skip("no FBGEMM here")
    model = copy.deepcopy(llama)
    folder, config, tensors = write(tmp_path, "eagle2_qwen")
    with hf_treespec.pack(model):
        text = plain(model, prompt(8), 10)
        slow = Slow(config, tensors, model, (-1,))
        drafter = Checked(hf_treespec.load_drafter(folder, target=model, min_gain=0.0), slow, text)
        spec = {"drafter": drafter, "max_nodes": 6, "fallback": False}
        assert model.generate(prompt(8), max_new_tokens=10, do_sample=False, tree_spec=spec)[0].tolist() == text
    assert len(drafter.checked) >= 3


def test_a_quantised_target_lends_its_lm_head(llama: PreTrainedModel, tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = copy.deepcopy(llama)
    wide = torch.nn.functional.pad(model.lm_head.weight.data, (0, 0, 0, 3))  # rows that fill whole blocks
    layer = bnb.nn.Linear4bit(H, len(wide), bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(wide, requires_grad=False, quant_type="nf4")
    model.lm_head = layer.to("cpu")
    model.config.vocab_size = len(wide)
    folder, config, tensors = write(tmp_path, "eagle2_qwen")
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(wide)}))
    text = plain(model, prompt(8), 10)
    loaded = hf_treespec.load_drafter(folder, target=model, min_gain=0.0)
    drafter = Checked(loaded, Slow(config, tensors, model, (-1,)), text)
    spec = {"drafter": drafter, "max_nodes": 6, "fallback": False}
    assert model.generate(prompt(8), max_new_tokens=10, do_sample=False, tree_spec=spec)[0].tolist() == text
    assert len(drafter.checked) >= 3


def test_states_that_a_target_leaves_out_are_named() -> None:
    states = (torch.zeros(1, 9, H), torch.zeros(1, 9, H), torch.zeros(1, 1, H))
    verified = Verified(TokenTree.root_only(1), torch.zeros(1, 1, VOCAB), states)
    assert taps(verified, (0, 1)).shape == (9, 2 * H)
    with pytest.raises(DrafterError, match=r"after layers \(0, 2\) are of \[9, 1\] tokens: it leaves some out"):
        taps(verified, (0, 2))


@pytest.mark.parametrize("layout", ["modelopt", "speculators"])
def test_both_conventions_of_counting_layers_are_probed(layout: str, deep: PreTrainedModel, tmp_path: Path) -> None:
    folder, config, tensors = write(tmp_path, layout)
    drafter = hf_treespec.load_drafter(folder, target=deep)
    assert isinstance(drafter, EagleDrafter)
    told = {"modelopt": (1, 3, 5), "speculators": (1, 3, 5)}[layout]
    other = {"modelopt": (0, 2, 4), "speculators": (2, 4, 6)}[layout]
    assert drafter.taps == told
    ids = prompt(20, seed=4)
    deep.generate(ids, max_new_tokens=4, do_sample=False, tree_spec={"drafter": drafter, "fallback": False})

    def explained(taps: tuple[int, ...]) -> float:
        slow, text = Slow(config, tensors, deep, taps), ids[0].tolist()
        found = [slow.log_q(text[: i + 1], [])[text[i + 1]] for i in range(1, len(text) - 1)]
        return float(torch.stack([f for f in found if f > -torch.inf]).mean())

    better = max((told, other), key=explained)
    assert drafter._decided == [better]
    assert drafter.for_call().hidden_layers == better


# -------------------------------------------------------------------- files


def test_inspect_says_what_it_found(tmp_path: Path) -> None:
    found = hf_treespec.inspect_checkpoint(write(tmp_path, "speculators")[0])
    assert found.format == "eagle3" and found.facts["layout"] == "speculators"
    assert found.facts["target"] == "someone/llama" and found.facts["tokens it can draft"] == DRAFTED
    assert found.facts["taken from the target"] == []
    assert found.facts["variants"] == ["norm_before_residual", "input_norm"]
    json.dumps(found.to_dict())


@pytest.mark.parametrize(("layout", "name"), [("eagle1", "eagle"), ("specforge", "eagle3"), ("modelopt", "eagle3")])
def test_formats(layout: str, name: str, tmp_path: Path) -> None:
    assert hf_treespec.inspect_checkpoint(write(tmp_path, layout)[0]).format == name


def test_wrong_tensors_are_named(deep: PreTrainedModel, tmp_path: Path) -> None:
    folder, _, _ = write(tmp_path, "specforge")
    torch.manual_seed(0)
    tensors = specforge()[1]
    del tensors["midlayer.mlp.up_proj.weight"]
    tensors["surprise.weight"], tensors["norm.weight"] = rand(2), rand(H + 1)
    save_file(tensors, folder / "model.safetensors")
    for action in (
        lambda: hf_treespec.load_drafter(folder, target=deep),
        lambda: hf_treespec.inspect_checkpoint(folder),
    ):
        with pytest.raises(CheckpointError) as error:
            action()
        assert "missing layers.0.mlp.up_proj.weight (40, 32)" in str(error.value)
        assert "unexpected surprise.weight (2,)" in str(error.value)
        assert "norm.weight is (33,) instead of (32,)" in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 48, "target_hidden_size": 48}, "hidden size of 48.* has 32"),
        ({"vocab_size": 99}, "vocabulary of 99.* has 61"),
    ],
)
def test_another_targets_head_is_refused(
    change: dict[str, int], says: str, deep: PreTrainedModel, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config, tensors = specforge()
    config |= change
    if "hidden_size" in change:
        global H
        before, H = H, 48
        try:
            tensors = specforge()[1]
        finally:
            H = before
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DrafterError, match=says):
        hf_treespec.load_drafter(tmp_path, target=deep)


def test_a_head_that_reads_deeper_layers_is_refused(deep: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = modelopt()
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 5, 9]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DrafterError, match=r"after layer 10.* has 6"):
        hf_treespec.load_drafter(tmp_path, target=deep)


def test_default_taps_need_the_target(tmp_path: Path, llama: PreTrainedModel) -> None:
    folder = write(tmp_path, "specforge")[0]
    with pytest.raises(DrafterError, match="pass target=model"):
        hf_treespec.load_drafter(folder)
    with pytest.raises(DrafterError, match="only 2"):
        hf_treespec.load_drafter(folder, target=llama)
    with pytest.raises(DrafterError, match="2 states"):
        hf_treespec.load_drafter(folder, target=llama, taps=(1, 2))


def test_a_head_without_a_target_checks_at_the_first_call(tmp_path: Path, llama: PreTrainedModel) -> None:
    drafter = hf_treespec.load_drafter(write(tmp_path, "speculators")[0])
    with pytest.raises(DrafterError, match=r"after layer 6.* has 2"):
        llama.generate(prompt(5), max_new_tokens=4, tree_spec=drafter)


def test_one_head_serves_one_dtype(tmp_path: Path, llama: PreTrainedModel) -> None:
    drafter = hf_treespec.load_drafter(write(tmp_path, "eagle1")[0], target=llama)
    with pytest.raises(DrafterError, match="load it once more"):
        copy.deepcopy(llama).to(torch.bfloat16).generate(prompt(5), max_new_tokens=4, tree_spec=drafter)


def test_half_precision_leaves_rotary_frequencies_alone(tmp_path: Path, deep: PreTrainedModel) -> None:
    half = copy.deepcopy(deep).to(torch.bfloat16)
    drafter = hf_treespec.load_drafter(write(tmp_path, "specforge")[0], target=half)
    assert isinstance(drafter, EagleDrafter)
    assert drafter.head.dtype == torch.bfloat16 and drafter.head.rotary_emb.inv_freq.dtype == torch.float32
    assert half.generate(prompt(9), max_new_tokens=6, do_sample=False, tree_spec=drafter).shape == (1, 15)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    with pytest.raises(CheckpointError, match="there is no folder"):
        hf_treespec.load_drafter(folder)
    folder.mkdir()
    with pytest.raises(CheckpointError, match="no weights"):
        hf_treespec.load_drafter(folder)
    (folder / "model.safetensors").write_bytes(b"not a file")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        hf_treespec.load_drafter(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with pytest.raises(CheckpointError, match="can be read safely"):
        hf_treespec.load_drafter(folder)
    (folder / "pytorch_model.bin").unlink()
    save_file({"strange": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="no known format: its tensors are strange"):
        hf_treespec.load_drafter(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        hf_treespec.load_drafter(folder)
    with pytest.raises(CheckpointError, match="give the folder"):
        hf_treespec.load_drafter(folder / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match="has no revision"):
        hf_treespec.load_drafter(folder, revision="main")


def test_heads_from_the_hub(tmp_path: Path, deep: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = write(tmp_path, "specforge")[0], []

    def snapshot_download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, "*.py" in allow_patterns))
        if repository == "someone/gone":
            raise OSError("404")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert isinstance(hf_treespec.load_drafter("someone/head", target=deep, revision="v2"), EagleDrafter)
    assert asked == [("someone/head", "v2", False)]
    with pytest.raises(CheckpointError, match=r"'someone/gone' is neither a folder nor .* revision 'v9'"):
        hf_treespec.load_drafter("someone/gone", target=deep, revision="v9")


def test_a_broken_vocabulary_is_refused(tmp_path: Path, deep: PreTrainedModel) -> None:
    torch.manual_seed(0)
    config, tensors = specforge()
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors["d2t"] += 100
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"d2t of .* ids below 61"):
        hf_treespec.load_drafter(tmp_path, target=deep)
    del tensors["d2t"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks d2t"):
        hf_treespec.load_drafter(tmp_path, target=deep)


def test_unknown_options_are_named(tmp_path: Path, deep: PreTrainedModel) -> None:
    folder = write(tmp_path, "specforge")[0]
    with pytest.raises(CheckpointError, match="wide"):
        hf_treespec.load_drafter(folder, target=deep, wide=3)
    with pytest.raises(DrafterError, match="wave=0"):
        hf_treespec.load_drafter(folder, target=deep, wave=0)
    with pytest.raises(DrafterError, match="needs a head"):
        hf_treespec.make_drafter("eagle")


# -------------------------------------------------------------------- the command line


def test_inspect_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write(tmp_path, "modelopt")[0])
    assert cli.main(["inspect", folder]) == 0
    shown = capsys.readouterr().out
    assert "eagle3" in shown and "ModelOpt" in shown and "model-00001-of-00002.safetensors" in shown
    assert "(1, 3, 5), or (0, 2, 4)" in shown and "embed_tokens, lm_head" in shown
    assert cli.main(["inspect", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["layout"] == "ModelOpt"
    assert cli.main(["inspect", str(tmp_path / "gone")]) == 2
    assert "there is no folder" in capsys.readouterr().err
