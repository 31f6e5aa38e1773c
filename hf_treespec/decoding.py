"""The round loop. START HERE.

    prefill                     the prompt's forward; its last token is the root of a tree of one node: round 0
    ┌─ round ──────────────────────────────────────────────────────────────────┐
    │ 1 draft    the drafter proposes a tree                                   │
    │ 2 size     it is cut to what this round may be                           │
    │ 3 verify   one target forward over all nodes                             │
    │ 4 accept   walk from the root while the target's own pick is a child     │
    │ 5 commit   token by token, until a stopping criterion; cache.keep(path)  │
    │ 6 report   statistics; the drafter learns what was committed             │
    └──────────────────────────────────────────────────────────────────────────┘

Invariant: the cache is one token short of the text. The text's last token is the next round's root.

It knows nothing of how trees are drafted, masked or cached, and nothing of `generate`'s arguments: `integration.py`
prepares a `Call`. One row for now; what flows through (tree, cache, noise) carries a row axis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Generator, Iterator
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from . import _compat, attention
from .accept import NoiseWindow, Picker, target_view, walk
from .budget import Sizer
from .cache import TreeCache, check_cache
from .config import TreeSpecConfig
from .drafters.base import Budget, Commit, DraftContext, Drafter, Prompt
from .errors import DrafterError, TreeError, UnsupportedArgumentError
from .knowledge import knowledge_of, save_costs
from .outputs import Outputs
from .stats import DecodeStats, RoundRecord, Stopwatch
from .support import round_arguments
from .tree import TokenTree
from .verify import Verified, Verifier, root_of_prompt


@dataclasses.dataclass
class Call:
    """One call of `generate`, prepared by transformers and by `integration.py`.

    `ids` is (1, T); `model_kwargs` is what transformers would hand to its own decoding methods.
    """

    model: PreTrainedModel
    config: TreeSpecConfig
    drafter: Drafter
    ids: torch.Tensor
    processors: LogitsProcessorList
    stopping: StoppingCriteriaList
    generation_config: Any
    model_kwargs: dict[str, Any]
    streamer: Any = None
    assistant_model: PreTrainedModel | None = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None


class Decoding:
    """The state of one call. `rounds` does the work; `result` stands when it is exhausted."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.drafter = call.drafter.for_call()
        self.stats = DecodeStats(drafter=self.drafter.name)
        self.result: Any = None
        self.finished = False
        self.prompt_read = False  # by the drafter's own model, if it has one
        self.detail = False  # set by `stream`
        self.sampled = bool(call.generation_config.do_sample)
        self.sizer: Sizer | None = None
        if call.config.fallback:
            remember = call.config.remember
            self.sizer = knowledge_of(call.model, self.drafter.name, self.sampled, remember=remember)
        self.text = Text(call.ids)
        self.limit = call.stopping.max_length or sys.maxsize
        self.outputs = Outputs(call.generation_config)
        self._eos: dict[int, set[int]] = {}
        self.forward_arguments = round_arguments(call.model, call.model_kwargs)
        if self.drafter.hidden_layers and not call.model_kwargs.get("output_hidden_states"):
            states = _compat.states_argument(self.drafter.hidden_layers)
            call.model_kwargs["output_hidden_states"] = self.forward_arguments.constant["output_hidden_states"] = states

    def run(self) -> Any:
        """Decodes to the end; returns what plain `generate` would, with `.tree_spec` (`DecodeStats`) on it."""
        for _ in self.rounds():
            pass
        return self.result

    def rounds(self) -> Generator[RoundRecord, None, None]:
        """Runs the call and yields a record after each round, the prompt's first. May be closed early."""
        with self._borrowed_model():
            yield self.prefill()
            with _compat.optimize_for_decode(self.call.model):
                while not self.finished:
                    yield self.round()
        if self.sizer is not None and self.call.config.remember:
            save_costs(self.call.model)
        self.result = self.outputs.result(self.text.ids.clone(), self.source)
        self.result.tree_spec = self.stats

    @torch.no_grad()
    def round(self) -> RoundRecord:
        watch = Stopwatch(self.verifier.device)
        tree = self.draft(watch)  # 1
        tree = self.size(tree)  # 2
        verified = self.verify(tree, watch)  # 3
        commit = self.accept(verified)  # 4
        self.commit(commit)  # 5
        return self.report(commit, watch)  # 6

    # ---------------------------------------------------------------- the steps

    @torch.no_grad()
    def prefill(self) -> RoundRecord:
        """Round 0: the prompt's forward exactly as in plain decoding, and the first token from it."""
        call = self.call
        watch = Stopwatch(call.ids.device)
        self.source = _compat.prepared_cache(call.model, call.model_kwargs)
        check_cache(self.source)
        with watch.part("verify"):
            outputs = _compat.prefill(call.model, call.ids, call.generation_config, call.model_kwargs)
        self.outputs.prompt(outputs)
        verified = root_of_prompt(outputs, self.text.last_token)
        self._take_over(verified)
        commit = self.accept(verified)
        return self.report(commit, watch)

    def draft(self, watch: Stopwatch) -> TokenTree:
        """1 draft."""
        budget = self._limits()
        if self.sizer is not None and budget.max_nodes and budget.max_depth:
            budget = self.sizer.budget(budget, self.cache.filled)
        if budget.max_nodes == 0 or budget.max_depth == 0:
            return TokenTree.root_only(self.text.last_token)
        context = DraftContext(self.text.ids, [self.text.last_token], self.noise, self.limit - self.text.length)
        if not self.prompt_read:
            self.prompt_read = True
            with watch.part("read"):
                self.drafter.read_prompt()
        with watch.part("draft"):
            tree = self.drafter.draft(context, budget)
        _check_drafted(self.drafter, tree, self.text.last_token, self.vocabulary)
        return tree.prune(budget.max_nodes, budget.max_depth, budget.max_children)

    def size(self, tree: TokenTree) -> TokenTree:
        """2 size."""
        self.drafted = tree
        if len(tree) == 1:
            return tree
        return tree.depth_first() if self.sizer is None else self.sizer.cut(tree, self.cache.filled)

    def verify(self, tree: TokenTree, watch: Stopwatch) -> Verified:
        """3 verify."""
        with watch.part("verify"):
            return self.verifier.forward(tree)

    def accept(self, verified: Verified) -> Commit:
        """4 accept: tokens join the text one by one, as long as the tree has them and decoding goes on."""
        tokens: list[int] = []
        path: list[int] = []
        for node, token, child in walk(verified, self.picker, lambda: self.text.ids):  # noqa: B007 - used below
            path.append(node)
            tokens.append(token)
            self.text.append(token)
            self.finished = self.stop(token)
            if self.call.streamer is not None:
                self.call.streamer.put(torch.tensor([token]))
            if self.finished:
                break
        bonus = token if child is None else None
        return Commit([tokens], [path], [bonus], verified)

    def commit(self, commit: Commit) -> None:
        """5 commit: of the tree, the cache keeps the nodes whose successors are now in the text."""
        self.outputs.round(commit, self.cache)
        self.cache.keep(commit.path)
        if self.call.config.debug:
            cached = self.cache.filled - self.cached_by_prompt
            assert cached == self.text.new - 1, f"the cache holds {cached} new tokens and the text {self.text.new}"

    def report(self, commit: Commit, watch: Stopwatch) -> RoundRecord:
        """6 report."""
        if not self.finished:
            with watch.part("draft"):
                self.drafter.observe(commit)
        tree = commit.verified.tree
        seconds = watch.read()
        record = RoundRecord(
            index=len(self.stats.records),
            tokens=tree.tokens[0],
            parents=tree.parents[0],
            scores=tree.scores[0],
            path=commit.path[0],
            committed=commit.tokens[0],
            bonus=commit.bonus[0],
            seconds=seconds,
            **(self._details(commit) if self.detail else {}),  # after the watch was read
        )
        self.stats.records.append(record)
        if self.sizer is not None and record.index > 0:
            self._learn(record, watch.reading, self.sizer)
        return record

    def _learn(self, record: RoundRecord, reading: float, sizer: Sizer) -> None:
        """What the sizer takes from a round: its price, and which guesses came true."""
        drafted = len(self.drafted) > 1
        if drafted:
            sizer.learn(self.drafted, record.committed)
        sizer.account(
            rows=len(record.tokens),
            context=self.cache.filled - len(record.path),
            committed=len(record.committed),
            drafting=record.seconds["draft"] - reading,
            seconds=sum(record.seconds.values()) - reading,
            reading=reading,
            drafted=drafted,
            forwards=self.drafter.forwards if drafted else 0,
        )

    def _details(self, commit: Commit) -> dict[str, Any]:
        """What only somebody who looks at the round wants to know."""
        probability, rank = target_view(commit.verified, commit.path[0][-1], commit.bonus[0])
        drafted = self.drafted if self.stats.records else None  # the prompt's round drafts nothing
        sizing = None
        if self.sizer is not None and drafted is not None and len(drafted) > 1:
            context = self.cache.filled - len(commit.path[0])
            sizing = self.sizer.explain(drafted, context, nodes=len(commit.verified.tree) - 1)
        draft = drafted if drafted is not None and len(drafted) > 1 else None
        return {"target_probability": probability, "target_rank": rank, "sizing": sizing, "draft": draft}

    # ---------------------------------------------------------------- around them

    @contextlib.contextmanager
    def _borrowed_model(self) -> Iterator[None]:
        """The model as the loop needs it; the model, the user's cache and the streamer in order whatever happens."""
        call = self.call
        try:
            with attention.tree_attention_on(call.model):
                yield
        finally:
            if hasattr(self, "cache"):  # else the prompt's forward failed and the cache is as it was
                self.cache.release()
            if call.streamer is not None:
                call.streamer.end()

    def _take_over(self, verified: Verified) -> None:
        """Everything that needs the prompt's forward: the cache, the verifier, the noise, the drafter's start."""
        call, model = self.call, self.call.model
        spare = min(self.limit - self.text.length, MAX_SPARE) + call.config.max_nodes + 1
        self.cache = TreeCache(self.source, spare=spare)
        self.cached_by_prompt = self.cache.filled
        mask = call.model_kwargs.get("attention_mask")
        if mask is not None and mask.shape[-1] != self.cache.filled:
            raise UnsupportedArgumentError(
                f"attention_mask covers {mask.shape[-1]} tokens, but the cache holds {self.cache.filled} after the "
                "prompt; pass a mask over past and new tokens."
            )
        positions = call.model_kwargs.get("position_ids")
        if positions is None:
            positions = _compat.default_positions(model, mask, self.cache.filled)
        last_position = positions[..., -1:].to(model.device)
        self.first_position = int(last_position.max()) + 1
        self.position_boundary, self.positions_move = _compat.rope_boundary(_compat.text_config(model))
        self.verifier = Verifier(model, self.cache, last_position, mask, self.forward_arguments)
        self.vocabulary = verified.logits.shape[-1]
        self.noise = NoiseWindow((1, self.vocabulary), call.ids.device) if self.sampled else None
        self.picker = Picker(call.processors, self.noise, call.ids.device, self.outputs.recorder)
        self.drafter.start(
            Prompt(
                target=model,
                ids=call.ids,
                attention_mask=mask,
                do_sample=self.sampled,
                processors=call.processors,
                assistant_model=call.assistant_model,
                max_nodes=call.config.max_nodes,
                verified=verified,
                tokenizer=call.tokenizer,
                cache=self.cache,
                last_position=last_position,
                assistant_tokenizer=call.assistant_tokenizer,
            )
        )

    def _limits(self) -> Budget:
        """The user's limits, cut to what decoding may still commit and to where positions change their meaning."""
        config = self.call.config
        depth = min(config.max_depth, self.limit - self.text.length - 1)
        root = self.first_position + self.text.new - 1
        if self.position_boundary is not None:
            # a node beyond the boundary would change the rotary frequencies of the whole round (or leave a position
            # table) while plain decoding is still before it
            if root < self.position_boundary:
                depth = min(depth, self.position_boundary - 1 - root)
            elif self.positions_move:
                depth = 0
        return Budget(config.max_nodes, max(0, depth), config.max_children)

    def stop(self, token: int) -> bool:
        """Whether decoding ends with `token`, the text's last. Every criterion is asked, as in plain decoding."""
        stop = False
        for criterion in self.call.stopping:
            # these two need no tensors: no read from a device
            if type(criterion) is MaxLengthCriteria:
                stop |= self.text.length >= criterion.max_length
            elif type(criterion) is EosTokenCriteria:
                stop |= token in self._eos_tokens(criterion)
            else:
                stop |= bool(criterion(self.text.ids, self.outputs.scores).all())
        return stop

    def _eos_tokens(self, criterion: EosTokenCriteria) -> set[int]:
        if id(criterion) not in self._eos:
            self._eos[id(criterion)] = set(criterion.eos_token_id.tolist())
        return self._eos[id(criterion)]


# Slots allocated behind the prompt at once; a longer text grows the buffers by a third at a time.
MAX_SPARE = 1024


class Text:
    """The ids of one text while it grows: (1, t) views of a buffer, written only when somebody looks."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._buffer = ids
        self._written = self._prompt = ids.shape[1]
        self._pending: list[int] = []
        self.new = 0
        self.last_token = int(ids[0, -1]) if ids.shape[1] else 0  # embeddings only: the root's id is never looked at

    @property
    def length(self) -> int:
        return self._prompt + self.new

    @property
    def ids(self) -> torch.Tensor:
        """(1, t) int64. Earlier views stay valid: what is written is never changed."""
        if self._pending:
            if self.length > self._buffer.shape[1]:
                grown = self._buffer.new_empty((1, self.length + max(256, self.length // 2)))
                grown[:, : self._written] = self._buffer[:, : self._written]
                self._buffer = grown
            for place, token in enumerate(self._pending, self._written):
                self._buffer.narrow(1, place, 1).fill_(token)  # needs no copy from the host
            self._written = self.length
            self._pending = []
        return self._buffer.narrow(1, 0, self._written)

    def append(self, token: int) -> None:
        self._pending.append(token)
        self.new += 1
        self.last_token = token


def _check_drafted(drafter: Drafter, tree: TokenTree, root: int, vocabulary: int) -> None:
    if not isinstance(tree, TokenTree) or tree.rows != 1 or tree.tokens[0, 0] != root:
        raise DrafterError(
            f"drafter {drafter.name!r} returned {tree!r}; it must return a TokenTree of one row whose root is "
            f"context.last_token ({root})."
        )
    try:
        tree.check(vocabulary)
    except TreeError as error:
        raise DrafterError(f"drafter {drafter.name!r} returned a tree that breaks its contract: {error}") from error
