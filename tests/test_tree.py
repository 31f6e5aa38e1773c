"""`TokenTree` against slow versions of itself, and its drawing against its arrays."""

from __future__ import annotations

import numpy as np
import pytest

from hf_treespec import OptionError, TokenTree, TreeError, TreeSpecConfig, tree


def random_tree(seed: int, size: int = 14) -> TokenTree:
    rng = np.random.default_rng(seed)
    parents, scores = [-1], [1.0]
    for i in range(1, size):
        parents.append(int(rng.integers(0, i)))
        scores.append(scores[parents[i]] * float(rng.choice([1.0, 0.5, 0.3])))  # ties, also with the parent
    return TokenTree(rng.integers(0, 50, size), parents, scores)


def slow_path(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*slow_path(parents, parents[node]), node]


@pytest.mark.parametrize("seed", range(5))
def test_depths_ancestors_paths_and_children_agree_with_walking_up(seed: int) -> None:
    t = random_tree(seed)
    parents = t.parents[0].tolist()
    for node in range(len(t)):
        path = slow_path(parents, node)
        assert t.path(node) == path
        assert t.depths[0, node] == len(path) - 1
        assert np.flatnonzero(t.ancestors[0, node]).tolist() == path
        if node:
            twins = [i for i in range(len(t)) if parents[i] == parents[node] and t.tokens[0, i] == t.tokens[0, node]]
            assert t.child(parents[node], int(t.tokens[0, node])) == twins[0]
    assert t.child(0, 99) is None


@pytest.mark.parametrize("seed", range(5))
def test_ranks_and_depth_first_order_agree_with_sorting(seed: int) -> None:
    t = random_tree(seed)
    parents, scores = t.parents[0].tolist(), t.scores[0].tolist()

    def below(node: int) -> list[int]:
        children = [i for i in range(len(t)) if parents[i] == node]
        children = [i for _, i in sorted((-scores[i], i) for i in children)]
        assert t.sibling_ranks[0, children].tolist() == list(range(len(children)))
        return [node, *(i for child in children for i in below(child))]

    order = below(0)
    ordered = t.depth_first()
    assert ordered.tokens[0].tolist() == t.tokens[0, order].tolist()
    assert [ordered.path(n) for n in range(len(t))] == [sorted(order.index(i) for i in t.path(node)) for node in order]
    assert ordered.depth_first() is ordered


def test_the_drawing_is_the_tree() -> None:
    """The module docstring's table and grid describe one tree."""
    lines = (tree.__doc__ or "").splitlines()
    parents = next(line for line in lines if " parent " in line).split("parent")[1].split()
    depths = next(line for line in lines if " depth " in line).split("depth")[1].split()
    grid = [line.split()[1:] for line in lines if line[:9].strip().isdigit() and set(line.split()[1:]) <= {"1", "."}]
    t = TokenTree(range(6), [int(p) for p in parents])
    assert t.depths[0].tolist() == [int(d) for d in depths]
    assert t.ancestors[0].tolist() == [[cell == "1" for cell in row] for row in grid]


@pytest.mark.parametrize("seed", range(20))
def test_prune_keeps_the_best_nodes_that_still_are_a_tree(seed: int) -> None:
    t = random_tree(seed)
    limits = np.random.default_rng(seed)
    nodes, depth, children = int(limits.integers(0, 14)), int(limits.integers(1, 6)), int(limits.integers(1, 4))
    small = t.prune(nodes, depth, children)
    small.check(50)
    assert len(small) <= nodes + 1 and small.depths.max() <= depth
    assert all((small.parents[0] == i).sum() <= children for i in range(len(small)))
    kept = {tuple(t.tokens[0, t.path(n)].tolist()) for n in range(len(t))}
    assert all(tuple(small.tokens[0, small.path(n)].tolist()) in kept for n in range(len(small)))
    # best first, greedily, under the same limits
    order = sorted(range(1, len(t)), key=lambda n: (-t.scores[0, n], n))
    allowed = {0}
    for node in sorted(range(1, len(t))):
        siblings = [n for n in order if t.parents[0, n] == t.parents[0, node]]
        ok = siblings.index(node) < children and t.depths[0, node] <= depth and int(t.parents[0, node]) in allowed
        if ok:
            allowed.add(node)
    best = sorted((t.scores[0, n] for n in allowed - {0}), reverse=True)[:nodes]
    assert sorted(small.scores[0, 1:], reverse=True) == pytest.approx(best)


def test_a_tree_within_the_limits_is_left_alone() -> None:
    t = random_tree(0)
    assert t.prune(13, 13, 13) is t


def test_paths_merge_into_a_trie() -> None:
    t = TokenTree.from_paths(7, [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 6]])
    assert t.tokens[0].tolist() == [7, 1, 2, 3, 4, 5, 6]
    assert t.parents[0].tolist() == [-1, 0, 1, 2, 2, 0, 3]


def test_merge_is_the_union() -> None:
    one, other = TokenTree.from_paths(7, [[1, 2], [3]]), TokenTree.from_paths(7, [[3, 4], [1, 5]])
    both = one.merge(other)
    both.check()
    paths = {tuple(both.tokens[0, both.path(n)].tolist()) for n in range(len(both))}
    assert paths == {(7,), (7, 1), (7, 1, 2), (7, 3), (7, 3, 4), (7, 1, 5)}


def test_stacked_rows_are_padded_with_dead_nodes() -> None:
    both = TokenTree.stack([TokenTree.chain(7, [1, 2]), TokenTree.root_only(9)])
    both.check()
    assert both.tokens.tolist() == [[7, 1, 2], [9, 0, 0]]
    assert both.sizes.tolist() == [3, 1]
    assert both.depths.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert both.child(0, 0, row=1) is None  # padding is nobody's child
    pruned = both.prune(1, 5, 5)
    assert pruned.tokens.tolist() == [[7, 1], [9, 0]] and pruned.sizes.tolist() == [2, 1]


@pytest.mark.parametrize(
    "tokens, parents, scores, message",
    [
        ([], [], None, "not empty"),
        ([1, 2], [-1], None, "must be equal"),
        ([1, 2], [-1, 1], None, "node 1 has parent 1"),
        ([1, 2, 3], [-1, 2, 0], None, "node 1 has parent 2"),
        ([1, 2], [-1, -1], None, "node 1 has parent -1"),
        ([1, 2], [0, 0], None, "root and dead nodes"),
        ([1, 2], [-1, 0], [1.0], "shape of tokens"),
    ],
)
def test_what_is_not_a_tree_is_refused(tokens: list[int], parents: list[int], scores: object, message: str) -> None:
    with pytest.raises(TreeError, match=message):
        TokenTree(tokens, parents, scores)


def test_config_says_what_differs() -> None:
    config = TreeSpecConfig(max_nodes=3, drafter_options={"min_match": 2}, drafter="ngram")
    assert config.to_dict() == {"drafter": "ngram", "drafter_options": {"min_match": 2}, "max_nodes": 3}
    assert TreeSpecConfig.from_value(config.to_dict()) == config
    assert TreeSpecConfig().to_dict() == {}
    with pytest.raises(OptionError, match="max_depth='3'"):
        TreeSpecConfig(max_depth="3")  # type: ignore[arg-type]


def test_depth_first_of_some_nodes_with_other_scores():
    tree = TokenTree([1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 1, 2], [1.0, 0.3, 0.6, 0.1, 0.2, 0.5])
    part = tree.depth_first({0, 1, 2, 4, 5}, [1.0, 0.4, 0.5, 0.1, 0.3, 0.2])
    assert part.tokens[0].tolist() == [1, 3, 6, 2, 5]  # the best child first, by the tree's own scores
    assert part.parents[0].tolist() == [-1, 0, 1, 0, 3]
    assert part.scores[0].tolist() == pytest.approx([1.0, 0.5, 0.2, 0.4, 0.3])
    assert part.ancestors[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]
