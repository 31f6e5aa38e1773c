"""`medusa`: independent heads on the target's last state, one for each token ahead (Cai et al. 2024, §2.1).

    state that chose the root ─┬─ head 0 ─ q of the token after the root
                               ├─ head 1 ─ q of the one after that
                               └─ …

A head's guess does not depend on the tokens above it, so that one forward of all heads a round gives every tree.

Legend: D heads, L residual blocks in each, h the target's hidden size, V its vocabulary.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from ..errors import CheckpointError, DrafterError
from ..tree import TokenTree
from .base import Budget, DraftContext, Prompt, register_drafter
from .checkpoint import Checkpoint, Format, compare, fill, register_format
from .growth import draft_warpers, log_q
from .head import HeadDrafter, check_target, output_layer, place_beside
from .positions import FixedTree, best_first


class ResBlock(torch.nn.Module):
    """x + SiLU(W x + b), (..., h) to (..., h)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.silu(self.linear(x))


class MedusaHeads(torch.nn.ModuleList):
    """D heads, under the names of the published checkpoints: `{head}.{block}.linear.weight`, `{head}.{L}.weight`.

    Args:
        hidden_size: h.
        heads: D.
        layers: L, 0 or more.
        vocab_size: V where each head has an output layer of its own; None where they use the target's.
    """

    def __init__(self, hidden_size: int, heads: int, layers: int = 1, vocab_size: int | None = None) -> None:
        super().__init__()
        self.hidden_size, self.layers, self.vocab_size = hidden_size, layers, vocab_size
        for _ in range(heads):
            head: list[torch.nn.Module] = [ResBlock(hidden_size) for _ in range(layers)]
            if vocab_size is not None:
                head.append(torch.nn.Linear(hidden_size, vocab_size, bias=False))
            self.append(torch.nn.Sequential(*head))

    def forward(
        self, states: torch.Tensor, output: torch.nn.Module | None = None, count: int | None = None
    ) -> torch.Tensor:
        """(D, ..., V) logits of the first `count` heads from states (..., h).

        Args:
            output: the target's output layer, for heads without their own: it is called once for all of them.
        """
        rows = torch.stack([head(states) for head in itertools.islice(self, count)])
        if self.vocab_size is not None:
            return rows
        assert output is not None, "heads without an output layer of their own need the target's"
        logits: torch.Tensor = output(rows)
        return logits


@register_drafter("medusa")
class MedusaDrafter(HeadDrafter):
    """Drafts with Medusa heads, loaded with `load_drafter`.

    Args:
        heads: the heads.
        tree: a fixed shape instead of the best nodes by joint score: paths of child ranks, as in Medusa's published
            lists. It is cut to `max_nodes`, `max_depth` and `max_children`; raise them to have all of it.

    Raises:
        DrafterError: no heads, or no such tree.
    """

    hidden_layers = (-1,)
    reads_all = False

    def __init__(self, heads: MedusaHeads | None = None, tree: Any = None) -> None:
        if heads is None:
            raise DrafterError(
                "drafter 'medusa' needs trained heads: load them with hf_treespec.load_drafter(path, target=model)."
            )
        self.heads = heads.eval()
        self.tree = None if tree is None else FixedTree(tree, len(heads))

    def start(self, prompt: Prompt) -> None:
        check_target("this Medusa head", prompt.target, **_sizes(self.heads))
        self._device = place_beside(self.heads, prompt.target)
        self._output = None if self.heads.vocab_size is not None else output_layer(prompt.target)
        self._vocabulary = prompt.verified.logits.shape[-1]
        self._warpers = draft_warpers(prompt)
        super().start(prompt)

    def draft(self, context: DraftContext, budget: Budget) -> TokenTree:
        self.forwards = 1
        state = self._take_unread().states[-1].to(self._device)
        with torch.no_grad():
            logits = self.heads(state, self._output, min(len(self.heads), budget.max_depth))
            scores = log_q(logits, self._warpers, self._vocabulary)
        if self.tree is None:
            return best_first(context, scores, budget)
        return self.tree.grow(context, budget, lambda depth, paths: scores[depth : depth + 1])


def _sizes(heads: MedusaHeads) -> dict[str, Any]:
    return {"hidden_size": heads.hidden_size, "vocab_size": heads.vocab_size}


# `{head}.{place}.linear.weight` and `.bias` are a residual block, `{head}.{place}.weight` the head's output layer
_NAME = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
# Medusa-2 is published as the whole model that was tuned together with its heads
_INSIDE = "medusa_head"


@register_format
class MedusaFormat(Format):
    """Medusa-1 (`medusa_lm_head.pt` or `.safetensors`) and Medusa-2 (a whole model with `medusa_head.…` in it).

    Heads and blocks are counted in the file: published configs say 2 heads where files hold 5.
    """

    name: ClassVar[str] = "medusa"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return any(_NAME.fullmatch(name) for name in checkpoint.shapes)

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        heads, _, names = self._empty(checkpoint)
        whole = len(names) < len(checkpoint.shapes)
        facts = {
            "layout": "Medusa-2" if whole else "Medusa-1",
            "target": "in the same checkpoint" if whole else checkpoint.config.get("base_model_name_or_path"),
            "heads": len(heads),
            "layers of a head": heads.layers,
            "target's hidden size": heads.hidden_size,
            "target's vocabulary": heads.vocab_size,
            "target's states it reads": "the last, after the norm",
            "taken from the target": ["lm_head"] if heads.vocab_size is None else [],
        }
        said = checkpoint.config.get("medusa_num_heads")
        if said is not None and said != len(heads):
            facts["heads by the config"] = said
        return facts

    def load(self, checkpoint: Checkpoint, target: PreTrainedModel | None, **options: Any) -> MedusaDrafter:
        heads, named, names = self._empty(checkpoint)
        if target is not None:
            check_target(f"the Medusa head of {checkpoint.source}", target, **_sizes(heads))
        drafter = MedusaDrafter(heads, **options)
        fill(named, checkpoint.load(names), checkpoint.source)
        if target is not None:
            place_beside(heads, target)
        heads.requires_grad_(False)
        return drafter

    def _empty(self, checkpoint: Checkpoint) -> tuple[MedusaHeads, torch.nn.Module, list[str]]:
        """Heads without weights that are as the file has them; the module that has its names; these names.

        Raises:
            CheckpointError: tensors are missing, unexpected or of differing shapes.
        """
        whole = any(name.startswith(f"{_INSIDE}.") for name in checkpoint.shapes)
        shapes = {n: s for n, s in checkpoint.shapes.items() if not whole or n.startswith(f"{_INSIDE}.")}
        parsed = [(found, name) for name in shapes if (found := _NAME.fullmatch(name))]
        blocks = [(found, name) for found, name in parsed if found[3] == "linear.weight"]
        outputs = [(found, name) for found, name in parsed if found[3] == "weight"]
        sized = [shapes[name] for _, name in [*blocks, *outputs] if len(shapes[name]) == 2]
        if not sized:
            raise CheckpointError(f"{checkpoint.source} has no matrix among its heads' tensors: {', '.join(shapes)}.")
        with torch.device("meta"):
            heads = MedusaHeads(
                hidden_size=sized[0][1],
                heads=1 + max(int(found[1]) for found, _ in parsed),
                layers=1 + max((int(found[2]) for found, _ in blocks), default=-1),
                vocab_size=shapes[outputs[0][1]][0] if outputs else None,
            )
        named = torch.nn.ModuleDict({_INSIDE: heads}) if whole else heads
        compare(named, shapes, checkpoint.source)
        return heads, named, list(shapes)
