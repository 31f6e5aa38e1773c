// A race as one animated SVG file: no script, no font and no picture from elsewhere. Made of strings, so that it runs
// under Node too; every text is escaped and steers nothing.

const EXPORT = { width: 920, tree: 300, most: 14, round: 2.3, end: 3 }; // pixels, rounds, seconds

const xml = text => inert(text, JOINERS).replace(/[\ufffe\uffff]/g, '\ufffd').replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
const number = value => String(Math.round(value * 100) / 100);

// Groups fade in by their own opacity, which is animated and so beats any class: what classes fade is inside.
const EXPORT_STYLE = `
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#17202c;white-space:pre;dominant-baseline:central}
.s{font-family:system-ui,sans-serif}.h{font-weight:700;font-size:19px}.soft{fill:#5b6675}
.n rect{fill:#fff;stroke:#8b95a3;stroke-width:1.3;stroke-dasharray:4 3}.n .m{opacity:0;font-weight:700}
.root rect{fill:#17202c;stroke:#17202c;stroke-dasharray:none}.root text{fill:#fff}
.kept rect{fill:#d7f2ec;stroke:#0b7f73;stroke-width:2.2;stroke-dasharray:none}.kept .m{fill:#0b7f73;opacity:1}
.own rect{fill:#fdeadb;stroke:#b4470b;stroke-width:2.2;stroke-dasharray:none}.own .m{fill:#b4470b;opacity:1}
.dropped>*{opacity:.45}.cut>*{opacity:.3}.ecut{fill:none;stroke:#8b95a3;stroke-opacity:.25}.e{fill:none;stroke:#8b95a3;stroke-width:1.3}.ekept{fill:none;stroke:#0b7f73;stroke-width:3}
.eown{fill:none;stroke:#b4470b;stroke-width:3}.edropped{fill:none;stroke:#8b95a3;stroke-opacity:.35}
.tk{fill:#0b7f73}.to{fill:#b4470b}`;

// Something that is there from one second of the loop to another, faded in where asked to.
function span(from, to, fade) {
  const length = Math.max(0.05, to - from);
  return fade
    ? `<animate attributeName="opacity" begin="m.begin+${number(from)}s" dur="${number(length)}s" values="0;1;1" keyTimes="0;${number(Math.min(0.9, fade / length))};1"/>`
    : `<set attributeName="visibility" to="visible" begin="m.begin+${number(from)}s" dur="${number(length)}s"/>`;
}

const become = (name, from, to) => `<set attributeName="class" to="${name}" begin="m.begin+${number(from)}s" dur="${number(Math.max(0.05, to - from))}s"/>`;

function exportLanes(race, y) {
  const length = raceLength(race) || 1, most = Math.max(1, ...ARMS.map(arm => race.lanes[arm].tokens)), shown = 5;
  return ARMS.map((arm, place) => {
    const lane = race.lanes[arm], at = y + place * 24, width = 560;
    const marks = [[0, 0], ...lane.marks.filter((_, n) => lane.marks.length < 40 || n % 3 === 2 || n === lane.marks.length - 1)].filter((mark, n, all) => n === 0 || mark[0] > all[n - 1][0]);
    const times_ = [...marks.map(mark => Math.min(1, mark[0] / length)), 1].map(number), widths = [...marks, marks[marks.length - 1]].map(mark => number(width * mark[1] / most));
    const colour = { tree: '#0b7f73', chain: '#5a6fb8', plain: '#8b95a3' }[arm];
    const keep = times_.filter((t, n) => n === times_.length - 1 || t !== times_[n + 1]);
    const values = widths.filter((_, n) => n === times_.length - 1 || times_[n] !== times_[n + 1]);
    if (keep[0] !== '0') { keep.unshift('0'); values.unshift('0'); }
    return `<text class="s" x="20" y="${at}">${arm}</text><rect x="70" y="${at - 7}" width="${width}" height="14" rx="7" fill="#eef1f5"/>`
      + `<rect x="70" y="${at - 7}" width="${number(width * lane.tokens / most)}" height="14" rx="7" fill="${colour}"><animate attributeName="width" begin="m.begin" dur="${shown}s" calcMode="discrete" values="${values.join(';')}" keyTimes="${keep.join(';')}"/></rect>`
      + `<text class="s soft" x="${width + 84}" y="${at}">${rate(lane).toFixed(1)} tokens/s · ${(perRound(lane) || 1).toFixed(2)} a pass</text>`;
  }).join('');
}

function exportRound(round, before, from, to) {
  const layout = layoutRound(round, before, false), { places, width, height } = placeNodes(layout, false);
  const scale = Math.min(1.1, (EXPORT.width - 40) / width, EXPORT.tree / height), left = (EXPORT.width - width * scale) / 2, top = (EXPORT.tree - height * scale) / 2;
  const keepAt = from + 0.95, parts = [];
  for (const item of layout.items) {
    const place = places.get(item.node), state = stateOf(round, item.node), own = state === 'own';
    const order = own ? round.kept.length : Math.max(0, round.kept.indexOf(item.node));
    const grown = own ? keepAt + 0.1 * order : from + 0.09 * item.depth, turn = keepAt + 0.1 * order;
    if (item.node) {
      const path = edgePath(places.get(item.parent), place, false);
      parts.unshift(`<path class="${own ? 'eown' : 'e'}" opacity="0" d="${path}">${span(grown, to, 0.25)}${own ? '' : become('e' + state, state === 'cut' ? keepAt - 0.3 : turn, to)}</path>`);
    }
    const mark = state === 'kept' || own ? `<tspan class="m">${own ? '◆' : '✓'} </tspan>` : '';
    parts.push(`<g transform="translate(${number(place.x)} ${number(place.y)})"><g class="n${own ? ' own' : state === 'root' ? ' root' : ''}" opacity="${item.node ? 0 : 1}">`
      + (item.node ? span(grown, to, 0.25) : '') + (state === 'kept' || state === 'dropped' || state === 'cut' ? become(`n ${state}`, state === 'cut' ? keepAt - 0.3 : turn, to) : '')
      + `<rect y="-14" width="${number(place.width)}" height="28" rx="${own || state === 'root' ? 14 : 7}"/><text x="11" style="font-size:12px">${mark}${item.space ? '·' : ''}${xml(item.shown)}</text></g></g>`);
  }
  return `<g visibility="hidden">${span(from, to)}<text class="s" x="20" y="0" style="font-weight:600;font-size:15px">${xml(roundSentence(round))}</text>`
    + `<g transform="translate(${number(left)} ${number(top + 20)}) scale(${number(scale)})">${parts.join('')}</g></g>`;
}

function exportText(rounds, starts, end, y) {
  const most = 108, lines = [[]];
  let used = 0;
  rounds.forEach((round, n) => round.pieces.forEach((piece, place) => {
    const shown = inert(piece.replace(/\n+/g, ' ').replace(/\t/g, ' '), JOINERS), wide = columns(shown);
    if (!shown) return;
    if (used + wide > most) { lines.push([]); used = 0; }
    used += wide;
    lines[lines.length - 1].push({ shown, kind: place < round.kept.length ? 'tk' : 'to', at: starts[n] + 1.2 });
  }));
  const drawn = lines.map((line, n) => `<text x="20" y="${y + 20 * n}">${line.map(({ shown, kind, at }) => `<tspan class="${kind}" opacity="0">${xml(shown)}${span(at, end, 0.2)}</tspan>`).join('')}</text>`);
  return { drawn: drawn.join(''), height: 20 * lines.length };
}

// The first rounds of a race, looping.
function animatedSvg(race) {
  const rounds = race.rounds.filter(round => round.index > 0).slice(0, EXPORT.most);
  const before = index => joined(race.rounds.filter(round => round.index < index));
  const starts = rounds.map((_, n) => 0.6 + n * EXPORT.round), end = 0.6 + rounds.length * EXPORT.round + EXPORT.end;
  const head = ['plain', 'chain'].map(arm => [arm, speedUp(race.lanes, arm)]).filter(([, ratio]) => ratio !== null).map(([arm, ratio]) => `${ratio.toFixed(2)}× as fast as ${arm === 'chain' ? 'a chain' : 'plain decoding'}`).join(', ');
  const first = race.rounds.find(round => round.index === 0), top = 130;
  const text = exportText(first ? [first, ...rounds] : rounds, first ? [-1.2, ...starts] : starts, end, top + EXPORT.tree + 52);
  const height = top + EXPORT.tree + 60 + text.height;
  const trees = rounds.map((round, n) => exportRound(round, before(round.index), starts[n], n === rounds.length - 1 ? end : starts[n] + EXPORT.round)).join('');
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${EXPORT.width} ${height}" width="${EXPORT.width}" height="${height}" role="img"><title>Tree speculative decoding, one recorded run</title><style>${EXPORT_STYLE}</style>`
    + `<rect width="100%" height="100%" rx="12" fill="#fff"><animate id="m" attributeName="rx" begin="0s;m.end" dur="${number(end)}s" from="12" to="12"/></rect>`
    + `<text class="s h" x="20" y="26">Tree: ${xml(head)}</text>${exportLanes(race, 56)}`
    + `<g transform="translate(0 ${top + 10})">${trees}</g>${text.drawn}</svg>`;
}

if (typeof module !== 'undefined') module.exports = { animatedSvg };
