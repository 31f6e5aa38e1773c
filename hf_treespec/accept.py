"""Shared noise and the walk: which tokens a verified tree commits.

The rule (`match`): at each node the target picks its own next token y. If y is a child, step there; else y is the bonus
and the walk ends. The emitted tokens never depend on the tree, so any tree gives the text of plain decoding. Sampling
is exact too, and with the same seed: `torch.multinomial(p, 1)` draws one exponential vector e of p's shape from the
generator and returns argmax(p / e), so the target's pick is a function of p and of the generator's next draw.

Processors run only at nodes reached, once a token, in order and on the true prefix: the calls of plain decoding. It
knows nothing of drafters or caches.

Legend: B rows, N nodes, V vocabulary. p as in Leviathan et al. 2023 (the target's probability).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as _lp

from .tree import TokenTree
from .verify import Verified

# Processors that look at one row of scores and nothing else: they may run on all nodes at once.
HISTORY_FREE = tuple(
    getattr(_lp, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TopHLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
    if hasattr(_lp, name)
)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that sampling on `device` draws from when none is named."""
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    if device.type == "mps":
        return module._get_default_mps_generator()  # type: ignore[no-any-return]
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


class NoiseWindow:
    """The exponential draws of coming tokens, in the order in which plain sampling will make them.

    `draw` is what the target uses: it moves the device's default generator exactly as `torch.multinomial` would.
    `peek` is for drafters: it looks ahead with a private copy of the generator, so that nothing else moves. A draw that
    was peeked at is not made again, unless somebody (a user's processor, say) has used the generator in between: then
    the draw that plain decoding would make counts, and the drafter only guessed worse.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._generator = default_generator(device)
        self._private = torch.Generator(device)
        self._ahead: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = deque()  # state before, draw, state after

    def draw(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(B, V), the draw of the next token; the generator moves on. `dtype` is that of the probabilities."""
        if self._ahead and dtype == torch.float32:
            before, noise, after = self._ahead.popleft()
            if torch.equal(before, self._generator.get_state()):
                self._generator.set_state(after)
                return noise
        self._ahead.clear()
        return torch.empty(self.shape, dtype=dtype, device=self.device).exponential_(1, generator=self._generator)

    def peek(self, index: int) -> torch.Tensor:
        """(B, V) float32, the draw of the token after `index` others from now (0: the next). Nothing moves."""
        if self._ahead and not torch.equal(self._ahead[0][0], self._generator.get_state()):
            self._ahead.clear()
        while len(self._ahead) <= index:
            before = self._ahead[-1][2] if self._ahead else self._generator.get_state()
            self._private.set_state(before)
            noise = torch.empty(self.shape, device=self.device).exponential_(1, generator=self._private)
            self._ahead.append((before, noise, self._private.get_state()))
        return self._ahead[index][1]


class Picker:
    """The target's own choice at a node: processors, then argmax or a draw, as `GenerationMixin._sample` does it.

    Args:
        processors: what `generate` prepared, warpers included.
        noise: for sampling; None picks greedily.
        device: of the prompt's ids. Scores come here before anything else, as in plain decoding.
        record: called with (processed, raw) rows (B, V) float32 of each token picked, for `output_scores`.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        noise: NoiseWindow | None,
        device: torch.device,
        record: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        self.processors, self.noise, self.device, self.record = processors, noise, device, record
        # One device-to-host read a round: pays where a read waits for a device, costs a pass over N rows elsewhere.
        self.at_once = device.type != "cpu" and record is None and all(type(p) in HISTORY_FREE for p in processors)

    def pick(self, prefix: Callable[[], torch.Tensor], logits: torch.Tensor) -> int:
        """The token that follows `prefix()` (1, t), from the raw logits (1, V) of its last token's node."""
        if not self.processors and self.noise is None and self.record is None:
            # of the same numbers: widening them to float32 keeps their order
            if logits.dtype == torch.float32 and logits.device.type == "cpu":
                return int(logits.numpy().argmax())  # the same rule for ties and nan, in a third of the time
            return int(logits.argmax(-1))
        raw = logits.to(copy=True, dtype=torch.float32, device=self.device)
        scores = self.processors(prefix(), raw) if self.processors else raw
        if self.record is not None:
            self.record(scores, raw)
        if self.noise is None:
            return int(scores.argmax(-1))
        return _checked(int(_sample(scores, self.noise.draw(scores.dtype))))

    def pick_all(self, verified: Verified) -> list[int]:
        """The token that follows each node, for processors that need no prefix. One device-to-host read."""
        raw = verified.logits[0].to(copy=True, dtype=torch.float32, device=self.device)
        scores = self.processors(torch.empty((len(raw), 0), dtype=torch.long, device=self.device), raw)
        if self.noise is None:
            return scores.argmax(-1).tolist()  # type: ignore[no-any-return]
        depths = verified.tree.depths[0]
        draws = torch.cat([self.noise.peek(depth) for depth in range(int(depths.max()) + 1)])
        return _sample(scores, draws[torch.from_numpy(depths).to(self.device)]).tolist()


def _sample(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """(n, V) processed scores and draws to (n,) tokens; -1 where the probabilities are not numbers."""
    probabilities = torch.nn.functional.softmax(scores, dim=-1)
    best, token = (probabilities / noise).max(-1)
    return torch.where(best.isnan(), -1, token)  # checked on the host, where the token is read anyway


def _checked(token: int) -> int:
    if token < 0:  # in the words of torch.multinomial
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    return token


def walk(
    verified: Verified, picker: Picker, prefix: Callable[[], torch.Tensor]
) -> Iterator[tuple[int, int, int | None]]:
    """Yields (node, token, child) for each token that the target emits.

    `node` is the one that it follows, `child` the one that drafted it; None for the bonus.

    The caller appends each token to the prefix before it asks for the next, and stops asking where decoding stops.

    Args:
        verified: one row of a verified tree.
        prefix: gives the committed ids (1, t), the tokens yielded so far included.
    """
    tree: TokenTree = verified.tree
    choices: Any = picker.pick_all(verified) if picker.at_once else None
    child: int | None = 0
    while child is not None:
        node = child
        if choices is None:
            token = picker.pick(prefix, verified.logits[:, node])
        else:
            token = _checked(choices[node])
            if picker.noise is not None:
                picker.noise.draw()
        child = tree.child(node, token)
        yield node, token, child


def target_view(verified: Verified, last: int, bonus: int | None) -> tuple[list[float], list[int]]:
    """What the target thinks of each token of a verified tree (one row), from raw logits: probability and rank.

    Args:
        last: the node that the bonus follows.

    Returns:
        For each node, the root first (1.0 and 0, by definition), then for the bonus if there is one: the probability of
        its token after its parent, and how many tokens are likelier.
    """
    tokens, parents = verified.tree.tokens[0, 1:].tolist(), verified.tree.parents[0, 1:].tolist()
    if bonus is not None:
        tokens, parents = [*tokens, bonus], [*parents, last]
    if not tokens:
        return [1.0], [0]
    first = len(verified.tree) - verified.logits.shape[1]  # the prompt's forward scores its last token alone
    rows, token = verified.logits[0].float(), torch.tensor(tokens, device=verified.logits.device)[:, None]
    rows = rows[torch.tensor(parents, device=rows.device) - first]
    own = rows.gather(1, token)
    probability = (own - rows.logsumexp(1, keepdim=True)).exp()[:, 0]
    return [1.0, *probability.tolist()], [0, *(rows > own).sum(1).tolist()]
