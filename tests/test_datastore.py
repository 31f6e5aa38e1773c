"""The datastore: what it finds against a plain search, the file that holds it, and what is drafted from it."""

from __future__ import annotations

import copy
import io
import json
import pickle
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB, build, prompt, run
from test_drafters import BUDGET, drafted, paths, started
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_treespec
from hf_treespec import (
    Budget,
    Commit,
    Datastore,
    DatastoreDrafter,
    DatastoreError,
    DrafterError,
    TokenTree,
    UnionDrafter,
    check_drafter,
    cli,
    loading,
    make_drafter,
)
from hf_treespec import datastore as format_
from hf_treespec.drafters.datastore import DatastoreSource, Place
from hf_treespec.fingerprint import fingerprint
from hf_treespec.verify import Verified


def made(path: Path, texts: list[list[int]], vocabulary: int = VOCAB) -> Datastore:
    format_.build(path, texts, vocabulary=vocabulary, fingerprint="of the test")
    return Datastore.open(path)


# -------------------------------------------------------------------- what it finds


def plain_search(texts: list[list[int]], tokens: list[int]) -> tuple[list[int], dict[int, int]]:
    """Positions where `tokens` occur within a text, in the order of the file, and what follows them."""
    positions, following, begin = [], {}, 0
    for text in filter(None, texts):
        for i in range(len(text) - len(tokens) + 1):
            if text[i : i + len(tokens)] == tokens:
                positions.append(begin + i)
                if i + len(tokens) < len(text):
                    token = text[i + len(tokens)]
                    following[token] = following.get(token, 0) + 1
        begin += len(text) + 1
    return positions, following


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("vocabulary", "dtype"), [(4, "uint16"), (2**16 - 1, "uint16"), (2**16, "uint32")])
def test_matches_are_those_of_a_plain_search(
    tmp_path: Path, monkeypatch: Any, seed: int, vocabulary: int, dtype: str
) -> None:
    monkeypatch.setattr(format_, "SAMPLE", 10**6)
    rng = np.random.default_rng(seed)
    low = vocabulary - 2 - seed % 2  # the highest ids: next to the separator's
    texts = [rng.integers(low, vocabulary, rng.integers(0, 60)).tolist() for _ in range(6)] + [[vocabulary - 1]]
    texts[3] = texts[2] = [*texts[1], *texts[1][:5]]  # the same text again: no end to its matches
    store = made(tmp_path / "store", texts, vocabulary)
    assert store.header.dtype == store.tokens.dtype == dtype
    assert store.header.texts == sum(map(bool, texts))
    for _ in range(150):
        length = int(rng.integers(1, format_.CONTEXT + 1))
        tokens = rng.integers(low, vocabulary, length).tolist()
        text = texts[int(rng.integers(len(texts)))]
        if len(text) >= length and rng.random() < 0.8:  # most random ones of such a length never occur
            begin = int(rng.integers(len(text) - length + 1))
            tokens = text[begin : begin + length]
        first, end = store.find(tokens)
        positions, following = plain_search(texts, tokens)
        assert sorted(store.suffixes[first:end].tolist()) == positions
        if positions:
            assert store.following((first, end), length) == (following, len(positions))


def test_matches_stop_at_the_ends_of_texts(tmp_path: Path) -> None:
    store = made(tmp_path / "store", [[1, 2], [3, 4], [2, 3]])
    assert store.find([2, 3])[1] - store.find([2, 3])[0] == 1
    assert store.find([4, 2]) == store.find([1, 2, 3]) == (0, 0)
    assert store.following(store.find([1, 2]), 2) == ({}, 1)


def test_a_token_beyond_the_vocabulary_is_not_the_separator(tmp_path: Path) -> None:
    """The target's vocabulary may be larger than the tokenizer's, and a text may hold any of its ids."""
    store = made(tmp_path / "store", [[1, 2], [1, 2], [1, 3]], vocabulary=5)
    for token in (5, 6, -1, 2**40):
        assert store.token(token) == store.narrow(store.token(1), 1, token) == store.find([1, 2, token]) == (0, 0)


def test_of_many_occurrences_some_are_looked_at_evenly(tmp_path: Path) -> None:
    text = [1, 2] * 3000 + [1, 3] * 1000
    store = made(tmp_path / "store", [text, [1] * 5])
    counts, total = store.following(store.find([1]), 1)
    assert total == format_.SAMPLE
    assert counts[2] / total == pytest.approx(0.75, abs=0.02)
    assert counts[3] / total == pytest.approx(0.25, abs=0.02)
    assert store.find([2, 1])[1] - store.find([2, 1])[0] == 3000


@pytest.mark.parametrize("length", [0, format_.CONTEXT + 1])
def test_matches_of_a_length_that_is_not_sorted_are_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(DatastoreError, match=f"1 to {format_.CONTEXT} tokens, not {length}"):
        made(tmp_path / "store", [[1] * 40]).find([1] * length)


# -------------------------------------------------------------------- the file


def test_the_file_is_mapped_and_read_only(tmp_path: Path) -> None:
    path = tmp_path / "store"
    texts = [[5, 6, 7, 8], [5, 6, 9]]
    made(path, texts)
    path.chmod(0o444)
    before = path.read_bytes()
    store = Datastore.open(path, tokenizer=None)
    for array in (store.tokens, store.starts, store.suffixes):
        assert not array.flags.writeable and not array.flags.owndata
        base: Any = array
        while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap)
    store.verify()
    assert store.tokens.tolist() == [5, 6, 7, 8, VOCAB, 5, 6, 9, VOCAB]
    for other in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert other.find([5, 6]) == store.find([5, 6])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_the_same_texts_give_the_same_file(tmp_path: Path) -> None:
    texts = np.random.default_rng(0).integers(0, 9, (5, 40)).tolist()
    for name in "ab":
        made(tmp_path / name, texts)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("kept", [0, 7, 12, 100, -1])
def test_a_file_cut_short_is_named(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "store"
    made(path, [[1, 2, 3]])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DatastoreError, match=r"store' is (damaged|not a datastore)"):
        Datastore.open(path)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b'"version": 1', b'"version": 2', "has format 2, this version of hf_treespec reads format 1"),
        (b'"tokens": 4', b'"tokens": 3', "its header says"),
        (b'"texts": 1', b'"texts": 4', "4 texts in 4 tokens"),
        (b'"uint16"', b'"uint17"', "dtype='uint17'"),
        (b'"vocabulary": 61', b'"vocabulary": -1', "vocabulary=-1"),
        (b'"context"', b'"contest"', "contest"),
        (b'{"tokens"', b'["tokens"', "its header cannot be read"),
        (b"\x89HFTSD\r\n", b"\x89HFTSD\n\n", "is not a datastore"),
    ],
)
def test_a_header_that_cannot_be_is_named(tmp_path: Path, old: bytes, new: bytes, told: str) -> None:
    path = tmp_path / "store"
    made(path, [[1, 2, 3]])
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(DatastoreError, match="store") as caught:
        Datastore.open(path)
    assert told in str(caught.value)


def test_changed_contents_are_found_by_verify(tmp_path: Path) -> None:
    path = tmp_path / "store"
    made(path, [[1, 2, 3]])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DatastoreError, match="damaged: its checksum"):
        Datastore.open(path).verify()


def test_changed_positions_are_named_when_they_are_met(tmp_path: Path) -> None:
    path = tmp_path / "store"
    made(path, [[1, 2, 3]])
    data = bytearray(path.read_bytes())
    data[-12:] = b"\xff" * 12  # the positions
    path.write_bytes(data)
    for ids in ([9, 1], [9, 1, 2]):
        with pytest.raises(DatastoreError, match="store' is damaged: its positions"):
            drafted(started(DatastoreDrafter(path), ids), ids)


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(DatastoreError, match=f"cannot open datastore '{path}'"):
            Datastore.open(path)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ([[1, VOCAB]], f"text 0 must be a list of token ids, 0 to {VOCAB - 1} each"),
        ([[1], [-1]], "text 1 must be"),
        ([[0.5]], "text 0 must be"),
        ([[[1]]], "text 0 must be"),
        ([[], []], "there is no text"),
    ],
)
def test_what_cannot_be_built(tmp_path: Path, texts: Any, told: str) -> None:
    with pytest.raises(DatastoreError, match=told):
        made(tmp_path / "store", texts)
    assert list(tmp_path.iterdir()) == []


def test_what_stands_there_is_kept_until_a_new_one_is_whole(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "store"
    made(path, [[1, 2, 3]])
    before = path.read_bytes()
    with pytest.raises(DatastoreError, match="store' exists"):
        made(path, [[4]])

    def interrupted(array: Any) -> Any:
        raise KeyboardInterrupt

    options: Any = {"vocabulary": VOCAB, "fingerprint": "", "overwrite": True}
    with monkeypatch.context() as patched:
        patched.setattr(format_, "_aligned", interrupted)  # the header is written, the arrays are not
        with pytest.raises(KeyboardInterrupt):
            format_.build(path, [[4]], **options)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["store"]
    format_.build(path, [[4]], **options)
    assert Datastore.open(path).tokens.tolist() == [4, VOCAB]
    with pytest.raises(DatastoreError, match="it is a folder"):
        made(tmp_path, [[4]])
    with pytest.raises(DatastoreError, match="there is no folder"):
        made(tmp_path / "none" / "store", [[4]])


# -------------------------------------------------------------------- tokenizers


def words(*tokens: str, lower: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if lower:
        backend.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def test_fingerprints_tell_apart_what_cuts_otherwise(tmp_path: Path) -> None:
    tokenizer = words("a", "b", "c")
    known = fingerprint(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert fingerprint(again) == known == fingerprint(words("a", "b", "c", chat_template="x", padding_side="left"))
    again("a b c", truncation=True, max_length=2)  # leaves its mark in the tokenizer's state
    assert fingerprint(copy.deepcopy(again)) == known
    others = [words("a", "c", "b"), words("a", "b", "d"), words("a", "b", "c", lower=True)]
    tokenizer.add_tokens([AddedToken("d")])
    assert len({known, *map(fingerprint, (*others, tokenizer))}) == 5
    assert fingerprint(types.SimpleNamespace(tokenizer=again)) == known  # a processor


def test_another_tokenizer_is_refused_by_both_fingerprints(tmp_path: Path, llama: PreTrainedModel) -> None:
    ours, other = (words(*(f"w{i + step}" for i in range(VOCAB))) for step in (0, 1))
    path = tmp_path / "store"
    format_.build(path, [[2, 3, 4]], vocabulary=VOCAB, fingerprint=fingerprint(ours))
    Datastore.open(path, tokenizer=ours)
    with pytest.raises(DatastoreError, match=f"{fingerprint(ours)}.*{fingerprint(other)}"):
        Datastore.open(path, tokenizer=other)
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
    for spec in ({"drafter": "datastore", "drafter_options": {"path": path}}, UnionDrafter(datastore=path)):
        llama.generate(prompt(), tree_spec=spec, tokenizer=ours, **arguments)
        with pytest.raises(DatastoreError, match=f"{fingerprint(ours)}.*{fingerprint(other)}"):
            llama.generate(prompt(), tree_spec=spec, tokenizer=other, **arguments)


def test_a_vocabulary_that_the_target_cannot_say_is_refused(tmp_path: Path, llama: PreTrainedModel) -> None:
    store = made(tmp_path / "store", [[2, 3]], vocabulary=VOCAB + 1)
    for drafter in (DatastoreDrafter(store), UnionDrafter(datastore=store)):
        with pytest.raises(DatastoreError, match=f"vocabulary of {VOCAB + 1} tokens, the target has {VOCAB}"):
            run(llama, prompt(), drafter, max_new_tokens=4, do_sample=False)


# -------------------------------------------------------------------- drafting


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "drafter 'datastore' needs path=.*hf-treespec datastore build"),
        ({"path": 3}, "path=3 must be a path"),
        ({"path": "x", "min_match": 0}, "min_match=0"),
        ({"path": "x", "min_match": 17}, "min_match=17"),
        ({"path": "x", "width": True}, "width=True"),
    ],
)
def test_options_are_named(options: dict[str, Any], told: str, llama: PreTrainedModel) -> None:
    with pytest.raises(DrafterError, match=told):
        make_drafter("datastore", **options)
    with pytest.raises(DrafterError, match=told):
        llama.generate(prompt(), tree_spec={"drafter": "datastore", "drafter_options": options}, max_new_tokens=4)


def test_the_known_continuation_is_drafted(tmp_path: Path) -> None:
    store = made(tmp_path / "store", [list(range(2, 30)), [40, 5, 6, 50, 51]])
    ids = [45, 46, 2, 3, 4, 5, 6]
    tree = drafted(started(DatastoreDrafter(store), ids), ids)
    assert (7, 8, 9, 10, 11, 12) in paths(tree)
    assert tree.scores[0, 1] > 0.3
    ids = [45, 46, 5, 6]  # two texts go on from here
    assert {(7, 8), (50, 51)} <= paths(drafted(started(DatastoreDrafter(store), ids), ids))
    ids = [45, 46, 47]
    assert len(drafted(started(DatastoreDrafter(store), ids), ids)) == 1
    assert len(drafted(started(DatastoreDrafter(store, min_match=3), [45, 5, 6]), [45, 5, 6])) == 1


def test_the_frequent_comes_first_and_a_shorter_match_has_the_rest(tmp_path: Path) -> None:
    store = made(tmp_path / "store", [[7, 8, 10], [7, 8, 10], [7, 8, 11], *([[8, 12]] * 20)])
    ids = [40, 41, 7, 8]
    tree = drafted(started(DatastoreDrafter(store), ids), ids, Budget(8, 1, 4))
    assert tree.tokens[0, 1] == 10
    assert set(tree.tokens[0, 1:].tolist()) == {10, 11, 12}


def test_the_budget_is_obeyed(tmp_path: Path) -> None:
    store = made(tmp_path / "store", np.random.default_rng(0).integers(0, 4, (3, 80)).tolist())
    ids = [1, 2, 3, 1, 2]
    for budget in (Budget(1, 1, 1), Budget(30, 2, 2), Budget(12, 12, 1)):
        tree = drafted(started(DatastoreDrafter(store), ids), ids, budget)
        assert 1 < len(tree) <= budget.max_nodes + 1 and tree.depths.max() <= budget.max_depth
        assert max((tree.parents[0] == i).sum() for i in range(len(tree))) <= budget.max_children


@pytest.mark.parametrize("accept", [0, 1, 3, "all"])
def test_state_after_acceptance_equals_a_fresh_one(tmp_path: Path, accept: Any) -> None:
    """After none, some or all of a path, for more rounds than a match is long: matches and drafts are a fresh drafter's."""
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 6, (6, 60)).tolist()
    store = made(tmp_path / "store", texts)
    template = DatastoreDrafter(store)
    ids = [*texts[0][:25], 50]
    kept = started(template, ids)
    for round_number in range(30):
        fresh = started(template, ids)
        kept._sources[0].odds = copy.deepcopy(fresh._sources[0].odds)  # type: ignore[attr-defined]
        tree, expected = drafted(kept, ids), drafted(fresh, ids)
        assert tree.tokens.tolist() == expected.tokens.tolist() and tree.parents.tolist() == expected.parents.tolist()
        assert np.array_equal(tree.scores, expected.scores)
        place: Place = kept._sources[0].root()  # type: ignore[attr-defined]
        longest = max(
            (n for n in range(1, 17) if n <= len(ids) and plain_search(texts, ids[-n:])[0]),
            default=0,
        )
        assert place.longest == longest
        for length in range(1, longest + 1):
            assert place.interval(length) == store.find(ids[-length:])
        leaf = len(tree) - 1 - round_number % max(1, len(tree) // 2)
        path = tree.path(leaf)[: None if accept == "all" else accept + 1]
        bonus = int(rng.integers(0, 6)) if round_number % 7 else 55  # now and then a token that never occurs
        tokens = [*tree.tokens[0, path[1:]].tolist(), bonus]
        kept.observe(Commit([tokens], [path], [bonus], Verified(tree, torch.zeros(1, len(tree), VOCAB))))
        ids += tokens


def test_only_as_much_of_the_text_is_kept_as_a_match_needs(tmp_path: Path) -> None:
    source = DatastoreSource(made(tmp_path / "store", [[1, 2, 3] * 30]))
    for token in [1, 2, 3] * 50:
        source.read(token)
    place, steps = source.root(), 0
    assert place.longest == format_.CONTEXT
    while place.before is not None:
        place, steps = place.before, steps + 1
    assert steps < format_.CONTEXT


def test_chances_are_learnt_where_guesses_were_asked(tmp_path: Path) -> None:
    store = made(tmp_path / "store", [[5, 6]] * 9)
    drafter = started(DatastoreDrafter(store), [40, 5])
    trees = []
    for _ in range(30):
        trees.append(drafted(drafter, [5], BUDGET))
        for tree, token in ((trees[-1], 41), (TokenTree.root_only(41), 5)):
            drafter.observe(Commit([[token]], [[0]], [token], Verified(tree, torch.zeros(1, len(tree), VOCAB))))
    assert trees[-1].scores[0, 1] < 0.5 * trees[0].scores[0, 1]


@pytest.mark.parametrize("name", ["datastore", "union"])
def test_same_text(name: str, llama: PreTrainedModel, datastore: Datastore) -> None:
    option = {"datastore": "path", "union": "datastore"}[name]
    check_drafter(make_drafter(name, **{option: datastore}), llama)


def test_the_targets_own_texts_draft_themselves(llama: PreTrainedModel, datastore: Datastore) -> None:
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30}
    plain = llama.generate(prompt(12, 0), **arguments)
    out = run(llama, prompt(12, 0), DatastoreDrafter(datastore), **arguments)
    assert torch.equal(out, plain)
    assert out.tree_spec.tokens_per_round > 3


def test_the_union_holds_the_datastores_guesses_too(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "store"
    made(path, [[4, 5, 50, 51]] * 4)
    ids = [*range(2, 30), 2, 3, 4, 5]
    union = started(UnionDrafter(datastore=path), ids, llama)
    assert {(6, 7, 8), (50, 51)} <= paths(drafted(union, ids))
    with pytest.raises(DatastoreError, match="absent"):
        make_drafter("union", datastore=str(tmp_path / "absent"))
    with pytest.raises(DrafterError, match="drafter 'union': datastore=7"):
        make_drafter("union", datastore=7)


# -------------------------------------------------------------------- the command line


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """In place of the embedded one: words w0, w1, ..."""
    tokenizer = words("?", *(f"w{i}" for i in range(1, VOCAB)))
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(loading, "demo_model_path", lambda: folder)
    return tokenizer


def line(**fields: Any) -> str:
    return json.dumps(fields) + "\n"


def test_build_and_info(capsys: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: Any) -> None:
    (tmp_path / "one.txt").write_text("w1 w2\nw3\n", encoding="utf-8-sig")
    (tmp_path / "many.jsonl").write_text(line(text="x", said="w4 w5") + "\n" + line(said="") + line(said="w6\u2028w7"))
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(b"w8 w9")))
    out = tmp_path / "store"
    names = [str(tmp_path / "one.txt"), str(tmp_path / "many.jsonl"), "-"]
    assert cli.main(["datastore", "build", *names, "--out", str(out), "--field", "said", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    store = Datastore.open(out, tokenizer=tokenizer)
    assert store.tokens.tolist() == [1, 2, 3, 61, 4, 5, 61, 6, 7, 61, 8, 9, 61]
    assert told["texts"] == 4 and told["fingerprint"] == fingerprint(tokenizer) and told["sources"][2] == "stdin"
    assert cli.main(["datastore", "info", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == told
    assert cli.main(["datastore", "info", str(out)]) == 0
    shown, err = capsys.readouterr()
    assert "9 tokens in 4 texts" in shown and fingerprint(tokenizer) in shown and err == ""


def test_long_texts_are_cut_at_the_ends_of_lines(monkeypatch: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    from hf_treespec import datastore_cli

    monkeypatch.setattr(datastore_cli, "PIECE", 20)
    monkeypatch.setattr(datastore_cli, "BATCH", 100)
    texts = ["w1 w2\n\n  w3 w4\nw5 " * 20, "w6 " * 50, "w7"]
    pieces = datastore_cli.cut(texts[0])
    assert "".join(pieces) == texts[0] and len(pieces) > 5
    assert not any(piece[0].isspace() for piece in pieces)
    ids = list(datastore_cli.tokenized(iter(texts), tokenizer, lambda _: None))
    assert ids == [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize(
    ("name", "content", "options", "told"),
    [
        ("absent.txt", None, [], "absent.txt"),
        ("a.txt", b"w1 \xff", [], "a.txt' is not UTF-8: byte 3 is 0xff"),
        ("a.txt", b"", [], "a.txt' holds no text"),
        ("a.jsonl", b"\n\n", [], "a.jsonl' holds no text"),
        ("a.jsonl", b'{"text": "w1"}\n\n{"text', [], "line 3: not JSON"),
        ("a.jsonl", b'{"text": "w1"}\n["w1"]', [], "line 2: not a JSON object"),
        ("a.jsonl", b'{"text": "w1"}\n{"said": "w1"}', [], "line 2: no field 'text' (its fields: 'said')"),
        ("a.jsonl", b'{"text": 3}', [], "line 1: field 'text' is int"),
        ("a.txt", b"w1", ["--field", "said"], "--field said"),
        ("a.txt", b"w1", ["--out", "/no-such-folder/x"], "/no-such-folder"),
        ("a.txt", b"w1", ["--model", "./no-such-folder"], "./no-such-folder"),
        (".", None, [], "is a folder"),
    ],
)
def test_mistakes_leave_nothing(
    capsys: Any, tmp_path: Path, tokenizer: Any, name: str, content: bytes | None, options: list[str], told: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    out = tmp_path / "store"
    assert cli.main(["datastore", "build", str(tmp_path / name), "--out", str(out), *options]) == 2
    shown, err = capsys.readouterr()
    assert shown == "" and len(err.splitlines()) == 1
    assert told in err
    assert not out.exists()


def test_existing_output_needs_force(capsys: Any, tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("w1 w2")
    command = ["datastore", "build", str(tmp_path / "a.txt"), "--out", str(tmp_path / "a.txt")]
    assert cli.main(command) == 2
    assert "exists" in capsys.readouterr().err and (tmp_path / "a.txt").read_text() == "w1 w2"
    assert cli.main([*command[:-1], str(tmp_path / "b")]) == 0
    assert cli.main([*command[:-1], str(tmp_path / "b"), "--force"]) == 0
    assert cli.main(["datastore", "info", str(tmp_path / "a.txt")]) == 2
    assert "not a datastore" in capsys.readouterr().err
    assert cli.main(["datastore"]) == 2


@pytest.mark.parametrize("drafter", [None, "union", "datastore"])
def test_generate_drafts_from_it(
    capsys: Any, monkeypatch: Any, tmp_path: Path, drafter: str | None, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = build("llama")
    monkeypatch.setattr(loading, "demo_model", lambda **options: (model, tokenizer))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = tokenizer.decode(model.generate(tokenizer("w3 w4", return_tensors="pt")["input_ids"], max_new_tokens=30)[0])
    (tmp_path / "a.txt").write_text(text)
    store = str(tmp_path / "store")
    assert cli.main(["datastore", "build", str(tmp_path / "a.txt"), "--out", store]) == 0
    capsys.readouterr()
    command = ["generate", "w3 w4", "--max-new-tokens", "28", "--no-fallback", "--json", "--datastore", store]
    assert cli.main([*command, *(["--drafter", drafter] if drafter else [])]) == 0
    told = json.loads(capsys.readouterr().out)
    assert f"w3 w4 {told['text'].strip()}" == text[: len(told["text"].strip()) + 6]
    assert told["stats"]["tokens_per_round"] > 2.5
    other = words("?", *(f"x{i}" for i in range(1, VOCAB)))
    monkeypatch.setattr(loading, "demo_model", lambda **options: (model, other))
    assert cli.main(command) == 2
    assert fingerprint(other) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--drafter", "ngram", "--datastore", "x"], "not for --drafter ngram"),
        (["--assistant-model", "y", "--datastore", "x"], "not for --assistant-model"),
        (["--head", "y", "--datastore", "x"], "not for --head"),
        (["--datastore", "absent"], "cannot open datastore 'absent'"),
        (["--drafter", "datastore"], "hf-treespec datastore build"),
    ],
)
def test_drafting_mistakes_are_one_line(capsys: Any, options: list[str], told: str) -> None:
    assert cli.main(["generate", "x", *options]) == 2
    shown, err = capsys.readouterr()
    assert shown == "" and len(err.splitlines()) == 1 and told in err


def test_public_names() -> None:
    assert {"Datastore", "DatastoreDrafter", "DatastoreError"} <= set(hf_treespec.__all__)
