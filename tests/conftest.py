"""Tiny random targets, built once a session, and trees of every shape around a text that is known beforehand."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_treespec
from hf_treespec import Budget, Datastore, DraftContext, Drafter, ScriptedDrafter, TokenTree
from hf_treespec.datastore import build as build_datastore
from hf_treespec.decoding import Decoding

VOCAB = 61
COMMON = {"vocab_size": VOCAB, "initializer_range": 0.5, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
LLAMA = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": ("Llama", LLAMA),
    "qwen3": ("Qwen3", LLAMA),
    "gemma3": ("Gemma3", {**LLAMA, **WINDOWS, "query_pre_attn_scalar": 8}),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2", {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    # one mask kind with a window, and chunks
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 8}),
}


def build(family: str, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    kind, options = FAMILIES[family]
    config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    torch.manual_seed(seed)
    config = config_class(**options)
    config._attn_implementation = attention
    model = getattr(transformers, name)(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


_built: dict[tuple[str, str], PreTrainedModel] = {}


def target(family: str, attention: str = "sdpa") -> PreTrainedModel:
    """The session's model of a family; tests do not change it."""
    key = (family, attention)
    if key not in _built:
        _built[key] = build(family, attention)
    return _built[key]


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return target("llama")


@pytest.fixture(scope="session")
def assistant() -> PreTrainedModel:
    """A drafting model that often agrees with `llama`: the same weights, a little perturbed."""
    model = copy.deepcopy(target("llama"))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="session")
def datastore(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    return datastore_of(llama, tmp_path_factory.mktemp("datastore") / "answers")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are faster on one thread, and the generator is each test's own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    hf_treespec.enable()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plain_until(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Called with a length: rounds draft nothing, and ask no drafter, until the text has so many tokens."""

    def patch(length: int) -> None:
        limits = Decoding._limits
        monkeypatch.setattr(
            Decoding, "_limits", lambda self: limits(self) if self.text.length >= length else Budget(0, 0, 1)
        )

    return patch


def prompt(length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


# Shapes around the true continuation `t` of the text: where decoys stand, and at which child place the truth is.
# A decoy at depth d is never the true token of that depth.


def _decoy(token: int, step: int) -> int:
    return (token + step) % VOCAB


def _chain(t: list[int]) -> list[list[int]]:
    return [t]


def _broken_chain(t: list[int]) -> list[list[int]]:
    return [t[:2] + [_decoy(x, 1) for x in t[2:]]]


def _truth_last(t: list[int]) -> list[list[int]]:
    """At every depth three decoys stand before the true child, and decoys have children of their own."""
    paths = []
    for d, x in enumerate(t):
        paths += [[*t[:d], _decoy(x, s), _decoy(x, s + 1)] for s in (1, 2, 3)]
    return [*paths, t]


def _wide(t: list[int]) -> list[list[int]]:
    return [[_decoy(t[0], s)] for s in range(1, 6)] + [t[:1]] if t else []


def _binary(t: list[int]) -> list[list[int]]:
    """A full binary tree of depth 3 whose truth turns right, left, right."""
    t, paths = t[:3], []
    for bits in range(2 ** len(t)):
        paths.append([x if (bits >> d & 1) == (d % 2 == 0) else _decoy(x, 7) for d, x in enumerate(t)])
    return paths


SHAPES: dict[str, Callable[[list[int]], list[list[int]]]] = {
    "chain": _chain,
    "broken_chain": _broken_chain,
    "truth_last": _truth_last,
    "wide": _wide,
    "binary": _binary,
}


def around(text: torch.Tensor, shape: str) -> ScriptedDrafter:
    """A drafter whose trees hold the true continuation of `text` (1, T), surrounded as `shape` says."""
    tokens = text[0].tolist()

    def script(context: DraftContext, budget: Budget) -> TokenTree:
        done = context.ids.shape[1]
        ahead = tokens[done : done + min(4, budget.max_depth)]
        return TokenTree.from_paths(context.last_token, SHAPES[shape](ahead))

    return ScriptedDrafter(script)


def adversary(text: torch.Tensor) -> ScriptedDrafter:
    """Always wrong: the true token of a depth is never among its children."""
    tokens = text[0].tolist()

    def script(context: DraftContext, budget: Budget) -> TokenTree:
        done = context.ids.shape[1]
        paths = [[_decoy(x, s) for x in tokens[done : done + budget.max_depth][:3]] for s in (1, 2, 3, 4)]
        return TokenTree.from_paths(context.last_token, paths)

    return ScriptedDrafter(script)


WIDE_OPEN = {"max_nodes": 64, "max_children": 8, "fallback": False, "debug": True}


def run(model: PreTrainedModel, ids: torch.Tensor, drafter: object = "ngram", **arguments: object) -> torch.Tensor:
    """Tree decoding with room for every shape and the loop's invariants asserted."""
    return model.generate(ids, tree_spec={"drafter": drafter, **WIDE_OPEN}, **arguments)


def datastore_of(model: PreTrainedModel, path: Path) -> Datastore:
    """What `model` answers to a few prompts, and to the two of `check_drafter`."""
    prompts = [prompt(12, seed) for seed in range(4)]
    prompts += [torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]]), torch.tensor([[2, 7, 1, 8, 2, 8, 2, 7]])]
    texts = [model.generate(ids, max_new_tokens=30, do_sample=False)[0].tolist() for ids in prompts]
    build_datastore(path, texts, vocabulary=VOCAB, fingerprint="of the test")
    return Datastore.open(path)


# The drafters that need a trained head, and a layout of which their tests write a random one.
HEADS = {"eagle": "eagle1", "medusa": "medusa1", "hydra": "prefix"}


def ready_drafter(name: str, model: PreTrainedModel, folder: Path) -> Drafter:
    """A drafter by its registered name, with what it cannot be made without. `folder` may hold files."""
    if name in HEADS:
        tests = importlib.import_module(f"test_{name}")
        return hf_treespec.load_drafter(tests.write(folder, HEADS[name])[0], target=model)
    if name == "datastore":
        return hf_treespec.DatastoreDrafter(datastore_of(model, folder / "datastore"))
    if name == "universal":
        return hf_treespec.make_drafter(name, tokenizer=letters(0), assistant_tokenizer=letters(7))
    return hf_treespec.make_drafter(name)


def plain(model: PreTrainedModel, ids: torch.Tensor, count: int) -> list[int]:
    """The text of greedy decoding: prompt and `count` new tokens."""
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0].tolist()


@torch.no_grad()
def output_that_knows(model: PreTrainedModel, text: list[int], ahead: int) -> torch.Tensor:
    """(V, h): an output layer that reads off the last state before each token of `text` the one `ahead` of that token.

    Exact while the text has fewer tokens than a state has numbers, a good guess beyond.
    """
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, : -ahead - 1]
    wanted = torch.nn.functional.one_hot(torch.tensor(text[ahead + 1 :]), VOCAB).float()
    return 8 * torch.linalg.lstsq(states, wanted, driver="gelsd").solution.T


def letters(shift: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCAB` letters, one a token; which letter is which token differs by `shift`."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({chr(65 + (i + shift) % VOCAB): i for i in range(VOCAB)}, []))
    inner.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)
