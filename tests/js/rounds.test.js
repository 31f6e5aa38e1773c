// What the page says about rounds, without a page:  node --test tests/js/

const { test } = require('node:test');
const assert = require('node:assert/strict');
const fs = require('fs'), path = require('path');
const r = require('../../app/ui/static/rounds.js');

const TRACE = r.parseDocument(fs.readFileSync(path.join(__dirname, '../../app/static_space/traces/fix-typos.json'), 'utf8'));

//          root ── a ── b        node 1 "a", 2 "x", 3 "b" (below a), own token 4 below b; "c" and "d" were cut
const ROUND = {
  index: 2, ids: [9, 1, 2, 3, 4], texts: ['root', ' a', ' x', 'b', '!'], parents: [-1, 0, 0, 1, 3], scores: [1, 0.3, 0.6, 0.15, 0],
  target: [1, 0.8, 0.1, 0.9, 0.7], ranks: [0, 0, 1, 0, 0], kept: [1, 3], bonus: true, pieces: [' a', 'b', '!'],
  seconds: { draft: 0.001, verify: 0.02, host: 0.002 }, sizing: { gain: [0, 0.6, 0.9, 1.05], seconds: [0.02, 0.021, 0.022, 0.05], rate: 50, affordable: 3, nodes: 3 },
  cut: { texts: ['c', 'd'], parents: [0, 5], scores: [0.1, 0.05] },
};

test('nodes know what became of them', () => {
  assert.deepEqual([0, 1, 2, 3, 4, 5, 6].map(n => r.stateOf(ROUND, n)), ['root', 'kept', 'dropped', 'kept', 'own', 'cut', 'cut']);
  assert.equal(r.drafted(ROUND), 3);
  assert.deepEqual(r.childrenOf(ROUND), [[2, 1, 5], [3], [], [4], [], [6], []]);
  assert.equal(r.draftChance(ROUND, 3), 0.5);
  assert.equal(r.draftChance(ROUND, 6), 0.5);
});

test('a layout has one place a node, and no row twice in a column', () => {
  for (const outline of [false, true]) {
    for (const round of [ROUND, ...TRACE.rounds]) {
      const { items, rows } = r.layoutRound(round, 'so far', outline);
      assert.equal(items.length, r.nodeCount(round));
      assert.equal(new Set(items.map(i => `${i.depth} ${i.row}`)).size, items.length);
      assert.ok(items.every(i => i.row >= 0 && i.row < rows && i.width > 0));
      const seen = new Set();
      for (const item of items) { assert.ok(item.node === 0 || seen.has(item.parent)); seen.add(item.node); }
      if (outline) assert.equal(rows, items.length);
    }
  }
});

test('sentences count right', () => {
  assert.equal(r.roundSentence(ROUND), 'Round 2: 5 guesses, the best 3 checked in one pass, 2 kept + 1 of its own = 3 tokens.');
  assert.match(r.whyTree(ROUND), /“a” was the drafter’s second choice/);
  assert.match(r.nodeSentence(ROUND, 1), /kept\. drafter 30 % .* target 80 %, its first choice/);
  assert.match(r.nodeSentence(ROUND, 4), /own token/);
  assert.match(r.nodeSentence(ROUND, 5), /not worth checking/);
  assert.match(r.roundSentence({ ...ROUND, ids: [9, 4], texts: ['r', '!'], parents: [-1, 0], kept: [], pieces: ['!'], cut: { texts: [], parents: [], scores: [] } }), /no guesses/);
});

test('acceptance by depth counts rounds, not nodes', () => {
  assert.deepEqual(r.acceptanceByDepth([{ ...ROUND, index: 0 }, ROUND]), [{ depth: 1, offered: 1, taken: 1 }, { depth: 2, offered: 1, taken: 1 }]);
});

test('speed-ups wait for both, and may be below one', () => {
  const lane = (tokens, seconds, finished) => ({ tokens, seconds, forwards: tokens, finished, marks: [[100, 1], [1000 * seconds, tokens]] });
  const lanes = { tree: lane(20, 1, true), chain: lane(20, 0.5, true), plain: lane(20, 2, false) };
  assert.equal(r.speedUp(lanes, 'chain'), 0.5);
  assert.equal(r.speedUp(lanes, 'plain'), null);
  assert.deepEqual([0, 99, 100, 999, 1000, 5000].map(t => r.tokensAt(lanes.tree, t)), [0, 0, 1, 1, 20, 20]);
});

test('the price of a size is in tokens', () => {
  const { gain, price, nodes } = r.sizingCurves(ROUND);
  assert.deepEqual(price.map(p => Math.round(100 * p) / 100), [0, 0.05, 0.1, 1.5]);
  assert.equal(gain[nodes], 1.05);
  assert.match(r.sizingSentence({ ...ROUND, sizing: { ...ROUND.sizing, nodes: 2 } }, true), /2 of 3 guesses checked.*rest would bring less/);
  assert.match(r.sizingSentence({ ...ROUND, sizing: { ...ROUND.sizing, nodes: 0, affordable: 0 } }, true), /earlier losses/);
  assert.match(r.sizingSentence({ ...ROUND, sizing: null }, false), /Sizing is off/);
});

test('text steers nothing', () => {
  const hostile = '\u202e\u2066\u0000\u001b\ud800\u200b\u2028\ufeff';
  assert.doesNotMatch(r.inert(hostile), /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}]/u);
  assert.equal(r.inert('é 👩‍👩‍👧‍👦 \n'), 'é 👩‍👩‍👧‍👦 \n');
  assert.equal(r.tokenLabel(' the').space, true);
  assert.equal(r.tokenLabel('\n').shown, '↵');
  assert.equal(r.tokenLabel('').shown, '∅');
  assert.equal(r.tokenLabel('\u0301').shown[0], '◌');
  assert.ok(Array.from(r.tokenLabel('\u0301'.repeat(900)).shown).length < 20);
  assert.equal(r.tokenLabel('👩‍👩‍👧‍👦'.repeat(30)).shown, '👩‍👩‍👧‍👦'.repeat(12) + '…');
  assert.equal(r.columns('a字👩‍👩‍👧‍👦'), 5);
});

test('documents that are none are told', () => {
  for (const value of ['', 'x', 'null', '{}', '{"v":2,"rounds":[],"lanes":{}}', '{"v":1,"rounds":[],"lanes":{}}', null, 5]) assert.equal(r.parseDocument(value), null);
  assert.ok(TRACE.rounds.length > 3);
  assert.deepEqual(r.newRounds([], TRACE).map(x => x.index), TRACE.rounds.map(x => x.index));
  assert.deepEqual(r.newRounds(TRACE.rounds.slice(0, 3), TRACE).map(x => x.index), TRACE.rounds.slice(3).map(x => x.index));
  assert.equal(r.isStop('{"v":1,"stopped":true}'), true);
});

test('links carry the settings', () => {
  const url = new URL(r.shareLink('https://x.example/p?prompt=old&__theme=dark#a', { prompt: 'a&b=<c>', sized: false, nodes: 9 }));
  assert.equal(url.searchParams.get('prompt'), 'a&b=<c>');
  assert.equal(url.searchParams.get('sized'), '0');
  assert.equal(url.searchParams.get('__theme'), null);
});
