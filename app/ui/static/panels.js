// Everything around the tree: headline, lanes, text, bars, curves. Text goes in by textContent alone.

function htmlElement(tag, className, text, parent) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

const times = ratio => ratio === null ? '–' : `${ratio.toFixed(2)}×`;

function showHeadline(root, race) {
  const { lanes } = race;
  for (const [arm, place] of [['plain', '.ts-plain'], ['chain', '.ts-chain']]) {
    const ratio = speedUp(lanes, arm), output = root.querySelector(place);
    output.textContent = ratio !== null && ratio < 1 ? `▼ ${times(ratio)}` : times(ratio);
    output.parentElement.classList.toggle('slow', ratio !== null && ratio < 1);
  }
  root.querySelector('.ts-tokens').textContent = lanes.tree.forwards > 1 ? perRound(lanes.tree).toFixed(2) : '–';
}

const ARM_SHAPES = { tree: 'many branches', chain: 'one branch', plain: 'no guesses' };

// The lanes at a time of the race's clock (milliseconds), or as far as they are.
function showLanes(root, race, clock) {
  const holder = root.querySelector('.ts-lanes');
  const goal = Math.max(1, ...ARMS.map(arm => race.lanes[arm].tokens), race.phase === 'running' && race.settings ? race.settings.new_tokens : 0);
  for (const arm of ARMS) {
    const lane = race.lanes[arm];
    let row = holder.querySelector(`.ts-lane.${arm}`);
    if (!row) {
      row = htmlElement('div', `ts-lane ${arm}`, undefined, holder);
      row.setAttribute('role', 'listitem');
      const name = htmlElement('span', 'name', undefined, row);
      htmlElement('b', '', arm, name);
      htmlElement('small', '', ARM_SHAPES[arm], name);
      htmlElement('div', 'fill', undefined, htmlElement('div', 'track', undefined, row));
      htmlElement('span', 'value', undefined, row);
    }
    const tokens = clock === null ? lane.tokens : tokensAt(lane, clock);
    row.querySelector('.fill').style.transform = `scaleX(${Math.min(1, tokens / goal)})`;
    const value = row.querySelector('.value');
    value.replaceChildren();
    if (clock !== null) value.textContent = `${plural(tokens, 'token')}${tokens >= lane.tokens && lane.finished ? ' · finished' : ''}`;
    else if (!lane.tokens) value.textContent = race.phase === 'running' ? 'waits for its turn' : '–';
    else {
      htmlElement('b', '', rate(lane).toFixed(1), value);
      value.append(` tokens/s · ${(perRound(lane) || 1).toFixed(2)} a pass`);
    }
  }
}

function statusOf(race, recorded) {
  const { phase, note, same_text: same, facts, lanes } = race;
  if (phase === 'error' || phase === 'limit') return { bad: true, text: note || 'The time limit of this demo ended the run.' };
  if (phase === 'idle') return { text: note || 'Press Run.' };
  if (phase === 'stopped') return { text: 'Stopped.' };
  if (phase === 'waiting') return { text: note || 'Loading …' };
  if (phase === 'running') {
    const now = race.order.find(arm => !lanes[arm].finished);
    return { text: `Running ${now || ''} … each method decodes the same prompt in turn.` };
  }
  const checked = same === true ? 'All three wrote the same text ✓' : same === false ? 'The texts differ: near-ties fell otherwise in reduced precision.' : '';
  return { text: `${recorded ? 'A recorded run. ' : ''}${checked}`, bad: same === false && facts.weights === 'float32' };
}

// The text up to and with a round, its last pieces lit up.
function showText(root, rounds, upTo, lit) {
  const text = root.querySelector('.ts-text');
  text.replaceChildren();
  for (const round of rounds) {
    if (round.index > upTo) break;
    round.pieces.forEach((piece, place) => {
      if (!piece) return;
      const kind = place < round.kept.length ? 'kept' : 'own';
      htmlElement('span', lit && round.index === upTo ? `${kind} new` : kind, inert(piece), text);
    });
  }
  text.scrollTop = text.scrollHeight;
}

// Stacked bars of draft, verify and host time. `pick` is told which round was chosen.
function showTimes(root, rounds, now, pick) {
  const holder = root.querySelector('.ts-times'), bars = rounds.filter(round => round.index > 0);
  holder.replaceChildren();
  const note = root.querySelector('.ts-timenote');
  if (!bars.length) { note.textContent = ''; return; }
  const width = 300, height = 110, most = Math.max(...bars.map(totalSeconds)), step = width / Math.max(bars.length, 12);
  const svg = svgElement('svg', { viewBox: `0 0 ${width} ${height + 12}`, preserveAspectRatio: 'none', role: 'img', 'aria-label': 'Bars of the time that each round took' }, holder);
  bars.forEach((round, place) => {
    const group = svgElement('g', { class: 'bar' }, svg);
    let y = height;
    for (const part of ['verify', 'host', 'draft']) {
      const tall = height * round.seconds[part] / most;
      y -= tall;
      svgElement('rect', { class: part, x: place * step + step * .12, y, width: step * .76, height: tall }, group);
    }
    const hit = svgElement('rect', { class: round.index === now ? 'hit now' : 'hit', x: place * step, y: 0, width: step, height: height + 12 }, group);
    const ms = part => (1000 * round.seconds[part]).toFixed(1);
    svgElement('title', {}, hit).textContent = `Round ${round.index}: draft ${ms('draft')}, verify ${ms('verify')}, host ${ms('host')} ms`;
    group.addEventListener('click', () => pick(round.index));
  });
  const sum = part => bars.reduce((a, round) => a + round.seconds[part], 0), all = sum('draft') + sum('verify') + sum('host');
  const share = part => `${part} ${Math.round(100 * sum(part) / all)} %`;
  const round = bars.find(r => r.index === now);
  note.textContent = `Bottom to top: ${share('verify')}, ${share('host')}, ${share('draft')}.` + (round ? ` Round ${round.index} took ${(1000 * totalSeconds(round)).toFixed(1)} ms.` : '');
}

function showDepths(root, rounds) {
  const holder = root.querySelector('.ts-depths');
  holder.replaceChildren();
  for (const { depth, offered, taken } of acceptanceByDepth(rounds).slice(0, 8)) {
    const row = htmlElement('div', 'ts-depthrow', undefined, holder);
    htmlElement('span', '', String(depth), row);
    htmlElement('div', 'fill', undefined, htmlElement('div', 'track', undefined, row)).style.width = `${100 * taken / offered}%`;
    htmlElement('span', '', `${taken} of ${offered}`, row);
  }
}

// Gain against price by nodes, and the size that was chosen.
function showSizing(root, round, sized) {
  const holder = root.querySelector('.ts-sizing'), note = root.querySelector('.ts-sizenote');
  holder.replaceChildren();
  note.textContent = round ? sizingSentence(round, sized) : '';
  const curves = round && round.index ? sizingCurves(round) : null;
  if (!curves) return;
  const width = 300, height = 104, most = curves.gain.length - 1, top = Math.max(...curves.gain, ...curves.price, 0.1);
  const x = n => 4 + (width - 8) * n / Math.max(1, most), y = value => height - (height - 6) * value / top;
  const svg = svgElement('svg', { viewBox: `0 0 ${width} ${height + 16}`, role: 'img', 'aria-label': note.textContent }, holder);
  svgElement('path', { class: 'axis', d: `M0 ${height}H${width}` }, svg);
  for (const name of ['gain', 'price']) svgElement('path', { class: name, d: 'M' + curves[name].map((value, n) => `${x(n).toFixed(1)} ${y(value).toFixed(1)}`).join('L') }, svg);
  svgElement('path', { class: 'chosen', d: `M${x(curves.nodes)} 0V${height}` }, svg);
  svgElement('circle', { class: 'dot', cx: x(curves.nodes), cy: y(curves.gain[curves.nodes]), r: 3.5 }, svg);
  const label = (px, py, text, anchor) => { svgElement('text', { x: px, y: py, 'text-anchor': anchor }, svg).textContent = text; };
  label(0, height + 13, '0', 'start');
  label(width, height + 13, `${curves.nodes} of ${plural(most, 'guess')} checked`, 'end');
}

function showFacts(root, race) {
  const { facts, settings } = race;
  if (!facts.model) { root.querySelector('.ts-facts').textContent = ''; return; }
  const place = facts.kind === 'cpu' ? `${plural(facts.threads, 'CPU thread')}` : facts.device;
  root.querySelector('.ts-facts').textContent = `${facts.model}, ${facts.weights}, ${place} · drafter ${settings.drafter} · order ${race.order.join(', ')}`;
}
