// What there is to say about a race: labels, layouts, sums and sentences. No page, no clock: runs under Node too.

const VERSION = 1;
const ARMS = ['tree', 'chain', 'plain'];

// ---------------------------------------------------------------- documents

// The document in `value`, or null for whatever is none.
function parseDocument(value) {
  let found = null;
  try { found = typeof value === 'string' ? JSON.parse(value) : value; } catch { return null; }
  const whole = found && found.v === VERSION && Array.isArray(found.rounds) && found.lanes && ARMS.every(a => found.lanes[a]);
  return whole ? found : null;
}

// Whether `value` says that the run was stopped by hand.
const isStop = value => typeof value === 'string' && value.length < 40 && /^{"v":1,"stopped":true}$/.test(value);

// Rounds that are new in `document`, in order: a running document repeats its last ones.
function newRounds(known, document) {
  const last = known.length ? known[known.length - 1].index : -1;
  return document.rounds.filter(round => round.index > last).sort((a, b) => a.index - b.index);
}

// ---------------------------------------------------------------- text that steers nothing

const STEERING = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu;
const JOINERS = '\u200c\u200d';

// `text` with every character that could steer what is around it shown as its number; `keep` are let through.
function inert(text, keep = '\n\t' + JOINERS) {
  return text.replace(STEERING, c => keep.includes(c) ? c : '⟨' + c.codePointAt(0).toString(16).toUpperCase().padStart(4, '0') + '⟩');
}

const segmenter = typeof Intl !== 'undefined' && Intl.Segmenter ? new Intl.Segmenter() : null;
const graphemes = text => segmenter ? Array.from(segmenter.segment(text), s => s.segment) : Array.from(text);

// The first `count` characters as a person counts them, of few code points each.
function clip(text, count) {
  const all = graphemes(text).map(g => Array.from(g).length > 12 ? Array.from(g).slice(0, 12).join('') : g);
  return all.length > count ? all.slice(0, count - 1).join('') + '…' : all.join('');
}

// A token on one line: whether a space stands before it, and what to show.
function tokenLabel(text, most = 13) {
  if (/^ *$/.test(text)) return { space: false, shown: '␣'.repeat(Math.min(text.length, 4)) || '∅' };
  const space = text.startsWith(' ');
  let shown = inert((space ? text.slice(1) : text).replace(/\n/g, '↵').replace(/\t/g, '⇥'), JOINERS);
  if (/^\p{M}/u.test(shown)) shown = '◌' + shown; // it would sit on what stands before
  return { space, shown: clip(shown, most) };
}

// Columns of monospaced text: wide characters and emoji take two.
function columns(text) {
  let sum = 0;
  for (const g of graphemes(text)) sum += /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{Extended_Pictographic}/u.test(g) ? 2 : 1;
  return sum;
}

// The last words of the text so far, for a root.
function textEnd(text, most = 16) {
  const all = graphemes(inert(text.slice(-300).replace(/\s+/g, ' '), JOINERS).trim());
  if (all.length <= most) return all.join('') || 'prompt';
  const tail = all.slice(-most + 1).join(''), space = tail.indexOf(' ');
  return '…' + (space >= 0 && space < tail.length - 1 ? tail.slice(space + 1) : tail);
}

const joined = rounds => rounds.map(round => round.pieces.join('')).join('');

// ---------------------------------------------------------------- one round

// Nodes: those that were checked, the root first; the target's own token, where there is one; those that were cut away.
const cutCount = round => round.cut ? round.cut.texts.length : 0;
const nodeCount = round => round.ids.length + cutCount(round);
const isCut = (round, node) => node >= round.ids.length;
const textOf = (round, node) => isCut(round, node) ? round.cut.texts[node - round.ids.length] : round.texts[node];
const parentOf = (round, node) => isCut(round, node) ? round.cut.parents[node - round.ids.length] : round.parents[node];
const scoreOf = (round, node) => isCut(round, node) ? round.cut.scores[node - round.ids.length] : round.scores[node];

const drafted = round => round.ids.length - 1 - (round.bonus ? 1 : 0);
const bonusNode = round => round.bonus ? round.ids.length - 1 : -1;
const totalSeconds = round => round.seconds.draft + round.seconds.verify + round.seconds.host;

function stateOf(round, node) {
  if (node === 0) return 'root';
  if (node === bonusNode(round)) return 'own';
  if (isCut(round, node)) return 'cut';
  return round.kept.includes(node) ? 'kept' : 'dropped';
}

// The drafter's chance of a node after its parent.
function draftChance(round, node) {
  const above = scoreOf(round, parentOf(round, node));
  return above > 0 ? Math.min(1, scoreOf(round, node) / above) : 0;
}

// Children by node, the likeliest drafted first, the target's own token last.
function childrenOf(round) {
  const children = Array.from({ length: nodeCount(round) }, () => []);
  for (let node = 1; node < children.length; node++) children[parentOf(round, node)].push(node);
  const own = bonusNode(round);
  for (const list of children) list.sort((a, b) => (a === own) - (b === own) || scoreOf(round, b) - scoreOf(round, a) || a - b);
  return children;
}

// Where nodes stand: [{node, depth, row, parent, shown, space, width}], parents before children, and how many rows.
// A first child stands in its parent's row, so that a path of first choices is a straight line.
function layoutRound(round, before, outline) {
  const children = childrenOf(round), items = [];
  let row = -1;
  const visit = (node, depth, first) => {
    if (outline || !first) row += 1;
    const { space, shown } = node ? tokenLabel(textOf(round, node)) : { space: false, shown: textEnd(before) };
    const mark = ['kept', 'own'].includes(stateOf(round, node)) ? 2 : 0;
    items.push({ node, depth, row, parent: parentOf(round, node), shown, space, width: 22 + 7.3 * (columns(shown) + (space ? 1 : 0) + mark) });
    children[node].forEach((child, place) => visit(child, depth + 1, place === 0));
  };
  visit(0, 0, false);
  return { items, rows: row + 1 };
}

const plural = (count, word) => `${count} ${word}${count === 1 ? '' : word.endsWith('s') ? 'es' : 's'}`;

// One sentence for people who watch, and for those who listen.
function roundSentence(round) {
  const tokens = round.pieces.length;
  if (round.index === 0) return 'Reading the prompt gives the first token; drafting begins after it.';
  if (!drafted(round) && cutCount(round)) return `Round ${round.index}: ${plural(cutCount(round), 'guess')}, none worth checking, so the model writes one token plainly.`;
  if (!drafted(round)) return `Round ${round.index}: no guesses; the model writes one token plainly.`;
  const own = round.bonus ? ' + 1 of its own' : '', all = drafted(round) + cutCount(round);
  const checked = cutCount(round) ? `${plural(all, 'guess')}, the best ${drafted(round)} checked` : `${plural(all, 'guess')} checked`;
  return `Round ${round.index}: ${checked} in one pass, ${round.kept.length} kept${own} = ${plural(tokens, 'token')}.`;
}

// Where a recorded run is best begun: at the first tree that has branches, or after the prompt.
function firstTree(rounds) {
  const found = rounds.findIndex(round => round.index > 0 && round.kept.length > 0 && childrenOf(round).filter((list, node) => node !== bonusNode(round) && list.length > 1).length > 1);
  return found > 0 ? found : Math.min(1, rounds.length - 1);
}

// Where a branch won that the drafter thought second: a chain would have stopped there. "" where none did.
function whyTree(round) {
  const children = childrenOf(round);
  const place = round.kept.findIndex(node => children[round.parents[node]][0] !== node);
  if (place < 0) return '';
  const node = round.kept[place], rank = children[round.parents[node]].indexOf(node) + 1;
  const nth = rank === 2 ? 'second' : rank === 3 ? 'third' : `${rank}th`;
  return `“${tokenLabel(round.texts[node], 20).shown}” was the drafter’s ${nth} choice: a chain would have stopped there.`;
}

const percent = share => share >= 0.9995 ? '100 %' : share >= 0.0995 ? `${Math.round(100 * share)} %` : share >= 0.001 ? `${(100 * share).toFixed(1)} %` : '< 0.1 %';

function nodeSentence(round, node) {
  const name = `“${clip(inert(textOf(round, node).replace(/\n/g, '↵').replace(/\t/g, '⇥'), JOINERS), 40)}”`;
  if (node === 0) return `${name}: the last token of the text so far.`;
  if (isCut(round, node)) return `${name}: guessed, but not worth checking. drafter ${percent(draftChance(round, node))} (whole path ${percent(scoreOf(round, node))}).`;
  const rank = round.ranks[node], choice = rank === 0 ? 'its first choice' : `its choice number ${rank + 1}`;
  const target = `target ${percent(round.target[node])}, ${choice}`;
  if (node === bonusNode(round)) return `${name}: the target’s own token. ${target}. Token ${round.ids[node]}.`;
  const verdict = round.kept.includes(node) ? 'kept' : 'dropped';
  return `${name}: ${verdict}. drafter ${percent(draftChance(round, node))} (whole path ${percent(round.scores[node])}), ${target}. Token ${round.ids[node]}.`;
}

// ---------------------------------------------------------------- sums over rounds

// [{depth, offered, taken}]: of the rounds whose tree reached a depth, how many kept a guess there.
function acceptanceByDepth(rounds) {
  const sums = [];
  for (const round of rounds) {
    if (round.index === 0) continue;
    const depth = [0];
    for (let node = 1; node <= drafted(round); node++) depth[node] = depth[round.parents[node]] + 1;
    const deepest = Math.max(...depth);
    for (let d = 1; d <= deepest; d++) {
      sums[d - 1] = sums[d - 1] || { depth: d, offered: 0, taken: 0 };
      sums[d - 1].offered += 1;
      sums[d - 1].taken += d <= round.kept.length ? 1 : 0;
    }
  }
  return sums;
}

const rate = lane => lane.seconds > 0 ? lane.tokens / lane.seconds : 0;
// Tokens of a forward after the prompt's, which gives the first one.
const perRound = lane => lane.forwards > 1 ? (lane.tokens - 1) / (lane.forwards - 1) : 0;

// How much faster the tree is than another arm; null until both have finished.
function speedUp(lanes, other) {
  const ready = lanes.tree.finished && lanes[other].finished && rate(lanes[other]) > 0;
  return ready ? rate(lanes.tree) / rate(lanes[other]) : null;
}

// Tokens of a lane after `milliseconds` of its own clock.
function tokensAt(lane, milliseconds) {
  let low = 0, high = lane.marks.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.marks[middle][0] <= milliseconds) low = middle + 1; else high = middle;
  }
  return low ? lane.marks[low - 1][1] : 0;
}

const raceLength = document => Math.max(0, ...ARMS.map(arm => 1000 * document.lanes[arm].seconds));

// ---------------------------------------------------------------- why this size

// Gain and price by nodes, in tokens; null where the round was not sized.
function sizingCurves(round) {
  const s = round.sizing;
  if (!s) return null;
  return { gain: s.gain, price: s.seconds.map(t => s.rate * (t - s.seconds[0])), nodes: s.nodes, affordable: s.affordable };
}

function sizingSentence(round, sized) {
  if (round.index === 0) return 'The prompt’s pass drafts nothing.';
  const curves = sizingCurves(round);
  if (!curves) {
    if (!sized && !drafted(round)) return 'There was nothing left to draft.';
    if (!sized) return `Sizing is off: all ${plural(drafted(round), 'guess')} were checked, whatever they cost.`;
    return 'Nothing was drafted: plain rounds were being measured, guesses did not pay of late, or no room was left for any.';
  }
  const { gain, price, nodes, affordable } = curves, most = gain.length - 1;
  if (nodes === 0) {
    const best = `The ${plural(most, 'guess')} promised ${gain[most].toFixed(2)} tokens and would have cost ${price[most].toFixed(2)} tokens’ worth of time`;
    return affordable === 0 ? `${best}; earlier losses leave nothing to spend. Decoded plainly.` : `${best}. No part of the tree pays. Decoded plainly.`;
  }
  const cost = price[nodes] < 0.005 ? 'and cost no more time here than one' : `for ${price[nodes].toFixed(2)} tokens’ worth of time`;
  const head = `${nodes} of ${plural(most, 'guess')} checked: they promise ${gain[nodes].toFixed(2)} tokens ${cost}.`;
  if (nodes === most) return `${head} All of them pay.`;
  if (nodes === affordable) return `${head} More might pay, but earlier gains do not cover the risk.`;
  return `${head} The rest would bring less than they cost.`;
}

// ---------------------------------------------------------------- links

// The address that opens the page with a run's settings.
function shareLink(address, settings) {
  const url = new URL(address);
  url.search = '';
  url.hash = '';
  for (const [name, value] of Object.entries(settings || {})) url.searchParams.set(name, typeof value === 'boolean' ? String(Number(value)) : String(value));
  return url.toString();
}

if (typeof module !== 'undefined') {
  module.exports = { ARMS, parseDocument, isStop, newRounds, inert, clip, tokenLabel, columns, textEnd, joined, drafted, cutCount, nodeCount, bonusNode, stateOf, draftChance, childrenOf, layoutRound, roundSentence, firstTree, whyTree, nodeSentence, acceptanceByDepth, rate, perRound, speedUp, tokensAt, raceLength, sizingCurves, sizingSentence, shareLink, percent, totalSeconds };
}
