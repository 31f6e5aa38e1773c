"""What heads read: pairs of a hidden state of the target and the token that followed it.

A head is trained on the target's own hidden states ("taps"). Each committed token makes one pair: what the target held
when it chose the token, and the token. EAGLE's heads read all pairs in order (Li et al. 2024a, §4.1, tokens "shifted by
one"), Medusa's only the last state.

    text        x0   x1   x2   x3  …  root
    states      g0   g1   g2   …
    pairs       (g0, x1) (g1, x2) (g2, x3) …    position of a pair: that of its state

Legend: T prompt tokens whose states are known, k taps, h the target's hidden size.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import _compat
from ..errors import DrafterError
from ..verify import Verified
from .base import Commit, Drafter, Prompt

_placing = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Pairs:
    """States of the target, each with the token that followed it.

    Attributes:
        states: (n, k·h), the taps side by side in the order that was asked for.
        tokens: n token ids.
        position: the position id of the first state; the others follow it without gaps.
    """

    states: torch.Tensor
    tokens: list[int]
    position: int

    def none(self, more: int = 0) -> Pairs:
        """No pairs, where they end, or `more` pairs later. Keeps none of the states alive."""
        return Pairs(self.states.new_empty((0, self.states.shape[1])), [], self.position + len(self.tokens) + more)

    def split(self) -> tuple[Pairs, Pairs]:
        """All but the last, and the last."""
        before = max(0, len(self.tokens) - 1)
        return (
            Pairs(self.states[:before], self.tokens[:before], self.position),
            Pairs(self.states[before:], self.tokens[before:], self.position + before),
        )


def _tapped(verified: Verified, layers: Sequence[int]) -> list[torch.Tensor]:
    """For each tap (1, n, h)."""
    assert verified.hidden_states is not None, "the loop gives states to drafters with `hidden_layers`"
    return [verified.hidden_states[layer] for layer in layers]


def _side_by_side(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """(n, k·h) of (n, h) for each tap, where the last one is."""
    return torch.cat([state.to(states[-1].device) for state in states], dim=-1)


def taps(verified: Verified, layers: Sequence[int]) -> torch.Tensor:
    """(T, k·h): the states of a forward at `layers`, side by side.

    Raises:
        DrafterError: the target leaves out some states of some layers (Gemma 3n and 4 do, where layers share keys).
    """
    states = [state[0] for state in _tapped(verified, layers)]
    lengths = [len(state) for state in states]
    if len(set(lengths)) > 1:
        raise DrafterError(
            f"this target's states after layers {tuple(layers)} are of {lengths} tokens: it leaves some out, so that a head "
            "cannot read them side by side. Use another drafter, e.g. tree_spec='union'."
        )
    return _side_by_side(states)


def prompt_pairs(prompt: Prompt, layers: Sequence[int]) -> Pairs:
    """The pairs within the prompt, as far back as its forward went.

    Its states may be fewer than its tokens (an earlier turn's cache, a chunked prefill): then the pairs begin later.
    Padding makes none, nor does a prompt that is embeddings only.
    """
    states = taps(prompt.verified, layers)
    known = min(len(states), prompt.ids.shape[1])
    states, tokens = states[len(states) - known :][:-1], prompt.ids[0, prompt.ids.shape[1] - known :][1:]
    length = prompt.ids.shape[1]
    if prompt.attention_mask is not None:
        mask = prompt.attention_mask[0]
        length = int(mask.sum())
        real = mask[len(mask) - known :][:-1].to(states.device) != 0  # embeddings only: nothing is known
        states, tokens = states[real], tokens[real.to(tokens.device)]
    return Pairs(states, tokens.tolist(), max(0, length - 1 - len(states)))


@dataclasses.dataclass(frozen=True)
class _Round:
    """What a round adds, before pairs are made of it.

    Attributes:
        states: for each tap (1, N, h), the round's nodes.
        path: for each token the node whose state it is paired with.
        tokens: those that were committed.
    """

    states: list[torch.Tensor]
    path: list[int]
    tokens: list[int]

    @classmethod
    def of(cls, commit: Commit, layers: Sequence[int]) -> _Round:
        states, nodes = _tapped(commit.verified, layers), len(commit.verified.tree)
        if states[0].shape[1] > nodes:  # the prompt's forward is a tree of its last token; the rest is not kept alive
            states = [state[:, -nodes:].clone() for state in states]
        return cls(states, commit.path[0], commit.tokens[0])


def _joined(rounds: Sequence[_Round]) -> torch.Tensor:
    """(n, k·h): the states of all tokens of these rounds."""
    index: list[int] = []
    nodes = 0
    for each in rounds:
        index += [nodes + node for node in each.path]
        nodes += each.states[0].shape[1]
    states = _side_by_side([torch.cat(tap, dim=1)[0] for tap in zip(*(each.states for each in rounds), strict=True)])
    return states[torch.tensor(index, device=states.device)]


def check_target(
    what: str, target: PreTrainedModel, *, hidden_size: int, vocab_size: int | None, layers: int = 0
) -> None:
    """Raises `DrafterError` unless a head that was trained for such sizes fits the target.

    Args:
        what: the head, for the message.
        hidden_size: of the states that it reads.
        vocab_size: of the target that it was trained for, None if it does not say.
        layers: the highest index into `hidden_states` that it taps.
    """
    config = _compat.text_config(target)
    for name, ours, theirs in (
        ("a hidden size", hidden_size, config.hidden_size),
        ("a vocabulary", vocab_size, config.vocab_size),
    ):
        if ours is not None and ours != theirs:
            raise DrafterError(
                f"{what} was made for {name} of {ours}, but {type(target).__name__} has {theirs}: it belongs to another "
                "target. Load the head that was trained for this one."
            )
    if layers > config.num_hidden_layers:
        raise DrafterError(
            f"{what} reads the state after layer {layers}, but {type(target).__name__} has {config.num_hidden_layers} "
            "layers: it belongs to another target."
        )


def output_layer(target: PreTrainedModel) -> torch.nn.Module:
    """What makes the target's logits of its last states, quantised or packed as it may be.

    Raises:
        DrafterError: the target has none.
    """
    layer: torch.nn.Module | None = target.get_output_embeddings()
    if layer is None:
        raise DrafterError(f"{type(target).__name__} has no output layer (lm_head) for a head to use.")
    return layer


def place_beside(head: torch.nn.Module, target: PreTrainedModel) -> torch.device:
    """Puts a head, in place, where the target's last states are made; its parameters into the target's dtype.

    Rotary frequencies keep theirs. Returns the device.

    Raises:
        DrafterError: the head serves a target elsewhere or in another dtype already.
    """
    device = device_of(output_layer(target), target)
    with _placing:
        before = getattr(head, "placed", None)
        if before is None:
            head.to(device)
            for parameter in head.parameters():
                parameter.data = parameter.data.to(target.dtype)
            head.placed = (device, target.dtype)  # type: ignore[assignment]
        elif before != (device, target.dtype):
            raise DrafterError(
                f"this head serves a target on {before[0]} in {before[1]}; load it once more for one on {device} in "
                f"{target.dtype}."
            )
    return device


def device_of(layer: torch.nn.Module, target: PreTrainedModel) -> torch.device:
    """Where a layer of the target computes; an offloaded one where the target's first layers do."""
    weight: Any = getattr(layer, "weight", None)
    on_hand = isinstance(weight, torch.Tensor) and weight.device.type != "meta"
    device: torch.device = weight.device if on_hand else target.device
    return device


class HeadDrafter(Drafter):
    """A drafter that reads pairs. Subclasses set `hidden_layers`, and read `_take_unread` in `draft`.

    Attributes:
        reads_all: whether it reads every pair, or only the last one.
    """

    needs = "a trained head"
    reads_all: bool = True

    def start(self, prompt: Prompt) -> None:
        pairs = prompt_pairs(prompt, self.hidden_layers)
        self._pairs = pairs if self.reads_all else pairs.none()
        self._rounds: list[_Round] = []  # those after `_pairs`

    def observe(self, commit: Commit) -> None:
        """Puts the round aside. Pairs are made of many rounds at once, when somebody drafts: of one they cost as much."""
        if not self.reads_all:
            count = sum(len(each.tokens) for each in self._rounds)
            if self._pairs.tokens or count:
                self._pairs = self._pairs.none(count)
                self._rounds = []
        self._rounds.append(_Round.of(commit, self.hidden_layers))

    @property
    def _unread(self) -> Pairs:
        """The pairs that were committed since the last draft, at first with those of the prompt; the last pair's token is
        the root."""
        if self._rounds:
            tokens = [token for each in self._rounds for token in each.tokens]
            states = _joined(self._rounds)
            if self._pairs.tokens:
                states = torch.cat([self._pairs.states.to(states.device), states])
            self._pairs = Pairs(states, self._pairs.tokens + tokens, self._pairs.position)
            self._rounds = []
        return self._pairs

    def _take_unread(self) -> Pairs:
        """The unread pairs, which are read with this."""
        pairs = self._unread
        self._pairs = pairs.none()
        return pairs
