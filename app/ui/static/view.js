// The page's one component: takes documents, plays rounds, answers to buttons and keys. `createView(element)` draws into
// the markup of tree.html inside `element` and returns {update(value), state()}.

const PACE = { grow: 340, step: 110, check: 520, rest: 900 }; // milliseconds at speed 1

const HINT = 'Point at a token, or reach it with Tab and the arrow keys, to see its chances.';

function createView(element) {
  const root = element.querySelector('.ts'), $ = selector => root.querySelector(selector);
  const svg = $('.ts-svg'), still = matchMedia('(prefers-reduced-motion: reduce)');
  let race = null, rounds = [], shown = -1, playing = true, timers = [], told = 0, raceFrame = 0, outline = false, stopped = null, measured = {};

  const later = (milliseconds, action) => timers.push(setTimeout(() => { if (root.isConnected) action(); }, milliseconds));
  const halt = () => { timers.forEach(clearTimeout); timers = []; };
  const speed = () => Number($('.ts-rate').value) || 1;
  const place = index => rounds.findIndex(round => round.index === index);

  function say(sentence, now = false) { // politely, and not more often than somebody can listen
    const time = performance.now();
    if (!now && time - told < 3000) return;
    told = time;
    $('.ts-live').textContent = sentence;
  }

  function stage(name) {
    svg.dataset.stage = name;
    root.querySelectorAll('.ts-steps li').forEach(step => step.classList.toggle('on', step.dataset.step === name));
  }

  function fit({ width, height }) {
    const box = $('.ts-stage');
    box.style.height = `${stageHeight()}px`;
    const inner = stageHeight() - 2, scale = outline ? 1 : Math.min(1.25, Math.max(0.72, Math.min((box.clientWidth - 2) / width, inner / height)));
    svg.setAttribute('width', Math.round(width * scale));
    svg.setAttribute('height', Math.round(height * scale));
    svg.style.margin = outline ? '0' : `${Math.max(0, (inner - height * scale) / 2)}px ${Math.max(0, (box.clientWidth - 2 - width * scale) / 2)}px 0`;
    box.scrollTo(0, 0);
  }

  function stageHeight() { // one for all rounds so far, or the page would jump
    if (measured.count !== rounds.length || measured.outline !== outline) {
      const tall = rounds.map(round => placeNodes(layoutRound(round, '', outline), outline).height).sort((a, b) => a - b);
      const most = tall[Math.floor(0.8 * (tall.length - 1))]; // the few taller ones are made smaller, or scroll
      measured = { count: rounds.length, outline, height: Math.max(measured.height || 180, Math.min(outline ? 460 : 430, most + 8)) };
    }
    return measured.height;
  }

  function draw(at) {
    const round = rounds[at];
    outline = root.clientWidth < 620;
    const drawn = drawTree(svg, round, joined(rounds.slice(0, at)), outline);
    fit(drawn);
    svg.setAttribute('aria-label', roundSentence(round));
    $('.ts-detail').textContent = HINT;
  }

  function settle(at) { // the round as it ended
    stage('keep');
    const round = rounds[at];
    $('.ts-sentence').textContent = roundSentence(round);
    $('.ts-detail').textContent = whyTree(round) || HINT;
    say(roundSentence(round));
    showText(root, rounds, round.index, playing && !still.matches);
  }

  function panels(at) {
    const round = rounds[at], last = rounds[rounds.length - 1];
    showTimes(root, rounds, round.index, index => go(place(index)));
    showSizing(root, round, race.settings && race.settings.sized);
    $('.ts-seek').max = last.index;
    $('.ts-seek').value = round.index;
    $('.ts-where').textContent = `round ${round.index} of ${last.index}`;
  }

  function show(at, animated) {
    halt();
    shown = at;
    draw(at);
    panels(at);
    if (!animated || still.matches) {
      svg.classList.add('still');
      settle(at);
      if (playing) later(PACE.rest * 1.6 / speed(), advance);
      return;
    }
    svg.classList.remove('still');
    const round = rounds[at], rate_ = speed(), guesses = drafted(round) + cutCount(round), deep = Math.max(0, ...[...svg.querySelectorAll('.node')].map(n => Number(n.getAttribute('aria-level')) - 1));
    root.style.setProperty('--grow', `${PACE.grow / rate_}ms`);
    root.style.setProperty('--step', `${PACE.step / rate_}ms`);
    $('.ts-sentence').textContent = guesses ? `Round ${round.index}: ${plural(guesses, 'guess')} …` : roundSentence(round);
    showText(root, rounds, round.index - 1, false);
    const grown = guesses ? (PACE.grow + deep * PACE.step) / rate_ : 0, checked = grown + (guesses ? PACE.check / rate_ : 0);
    const kept = checked + (PACE.grow + round.kept.length * PACE.step) / rate_;
    requestAnimationFrame(() => requestAnimationFrame(() => { if (shown === at && svg.dataset.stage === 'seed') stage('draft'); })); // the start must be committed first
    if (guesses) later(grown, () => stage('check'));
    later(checked, () => settle(at));
    later(kept + PACE.rest / rate_, advance);
  }

  function advance() {
    if (!playing) return;
    if (shown < rounds.length - 1) show(shown + 1, true);
    else halt(); // the next document, or the end
    if (shown === rounds.length - 1 && race.phase !== 'running' && !timers.length) setPlaying(false);
  }

  function setPlaying(on) {
    playing = on;
    const atEnd = shown >= rounds.length - 1 && rounds.length > 0;
    $('.ts-play').textContent = on ? 'Pause' : atEnd ? 'Replay' : 'Play';
    $('.ts-play').setAttribute('aria-pressed', String(on));
  }

  function go(at) { // somebody looks at a round: no motion, no playback
    if (!rounds.length) return;
    setPlaying(false);
    show(Math.max(0, Math.min(rounds.length - 1, at)), false);
    setPlaying(false);
    say(roundSentence(rounds[shown]), true);
  }

  function replayRace() { // the measured times of all lanes on one clock
    cancelAnimationFrame(raceFrame);
    const length = raceLength(race), began = performance.now();
    if (still.matches || !length) { showLanes(root, race, null); return; }
    const slow = Math.min(4, Math.max(1, 3500 / length)); // at least a few seconds, or nobody sees who wins
    const frame = now => {
      if (!root.isConnected) return;
      const clock = Math.min(length, (now - began) / slow);
      showLanes(root, race, clock);
      $('.ts-clock').textContent = `${(clock / 1000).toFixed(2)} s on each method’s own clock${slow > 1.05 ? `, shown ${slow.toFixed(1)}× slower` : ''}`;
      if (clock < length) raceFrame = requestAnimationFrame(frame);
      else { showLanes(root, race, null); $('.ts-clock').textContent = clockNote(); }
    };
    raceFrame = requestAnimationFrame(frame);
  }

  const clockNote = () => race.phase === 'idle' || race.phase === 'error' ? '' : 'Really run, one after the other; only decoding is timed.';

  function begin(next) { // another run
    halt();
    cancelAnimationFrame(raceFrame);
    rounds = [];
    shown = -1;
    measured = {};
    setPlaying(true);
    svg.replaceChildren();
    svg.setAttribute('aria-label', 'No round yet');
    for (const selector of ['.ts-text', '.ts-times', '.ts-depths', '.ts-sizing', '.ts-timenote', '.ts-sizenote', '.ts-detail', '.ts-sentence']) $(selector).replaceChildren();
    $('.ts-where').textContent = '';
    root.dataset.run = next.run;
  }

  function stop() { // the server sends nothing more of this run
    if (!race || race.phase !== 'running' && race.phase !== 'waiting') return;
    stopped = race.run;
    race = { ...race, phase: 'stopped' };
    root.dataset.phase = 'stopped';
    $('.ts-status').textContent = statusOf(race, false).text;
    say('Stopped.', true);
  }

  function update(value) {
    if (isStop(value)) { stop(); return; }
    const next = parseDocument(value);
    if (!next || next.run === stopped) return;
    const another = !race || race.run !== next.run, wasRunning = race && !another && race.phase === 'running';
    if (another) begin(next);
    else if (next.seq < race.seq) return;
    race = next;
    const fresh = newRounds(rounds, race);
    rounds = rounds.concat(fresh);
    if (race.rounds.length >= rounds.length) rounds = race.rounds; // all of them: mends what was lost
    root.dataset.phase = race.phase;
    showHeadline(root, race);
    showFacts(root, race);
    if (fresh.length) showDepths(root, rounds);
    const { text, bad } = statusOf(race, Boolean(race.recorded));
    $('.ts-status').textContent = text;
    $('.ts-status').classList.toggle('bad', Boolean(bad));
    if (bad) say(text, true);
    const over = race.phase !== 'running' && race.lanes.tree.tokens > 0;
    $('[data-act=race]').disabled = !over;
    root.querySelectorAll('[data-act=json],[data-act=svg]').forEach(button => { button.disabled = !over; });
    $('.ts-clock').textContent = clockNote();
    showLanes(root, race, null);
    if (over && wasRunning) { replayRace(); say(`${$('.ts-plain').textContent} as fast as plain decoding, ${$('.ts-chain').textContent} as fast as a chain. ${text}`, true); }
    if (!rounds.length) return;
    if (shown < 0) show(race.recorded ? firstTree(rounds) : Math.min(1, rounds.length - 1), true);
    else { panels(shown); if (playing && !timers.length) advance(); }
  }

  function press(action) {
    if (action === 'link') return copyLink();
    if (!race || !rounds.length) return undefined;
    if (action === 'json') return saveFile(`tree-${race.run}.json`, 'application/json', JSON.stringify({ ...race, rounds }));
    if (action === 'svg') return saveFile(`tree-${race.run}.svg`, 'image/svg+xml', animatedSvg({ ...race, rounds }));
    if (action === 'race') return replayRace();
    if (action !== 'play') return go({ first: 0, prev: shown - 1, next: shown + 1, last: rounds.length - 1 }[action]);
    if (playing) { halt(); svg.classList.add('still'); setPlaying(false); settle(shown); return undefined; }
    const from = shown >= rounds.length - 1 ? Math.min(1, rounds.length - 1) : shown;
    setPlaying(true);
    return show(from, true);
  }

  function copyLink() {
    const link = shareLink(location.href, race && race.settings), button = $('[data-act=link]');
    const done = copied => { button.textContent = copied ? 'Link copied' : 'Link is in the address bar'; setTimeout(() => { button.textContent = 'Copy link'; }, 2500); };
    try { history.replaceState(null, '', link); } catch { /* a frame that may not */ }
    if (navigator.clipboard) navigator.clipboard.writeText(link).then(() => done(true), () => done(false)); else done(false);
  }

  const saveFile = (name, type, content) => {
    const link = document.createElement('a'), url = URL.createObjectURL(new Blob([content], { type }));
    link.href = url;
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  };

  const nodeOf = event => { const group = event.target.closest && event.target.closest('[data-node]'); return group ? Number(group.dataset.node) : null; };
  const detail = event => { const node = nodeOf(event); if (node !== null && rounds[shown]) $('.ts-detail').textContent = nodeSentence(rounds[shown], node); };
  svg.addEventListener('mouseover', detail);
  svg.addEventListener('focusin', detail);
  svg.addEventListener('click', detail);
  svg.addEventListener('keydown', event => {
    const node = nodeOf(event), to = node === null ? null : neighbour(rounds[shown], node, event.key);
    if (to === null) return;
    event.preventDefault();
    const next = svg.querySelector(`[data-node="${to}"]`);
    svg.querySelectorAll('[data-node]').forEach(group => group.setAttribute('tabindex', group === next ? '0' : '-1'));
    if (playing) press('play'); // a tree that somebody walks in stays
    svg.querySelector(`[data-node="${to}"]`).focus();
  });
  root.addEventListener('click', event => { const button = event.target.closest('button[data-act]'); if (button && !button.disabled) press(button.dataset.act); });
  $('.ts-seek').addEventListener('input', event => go(place(Number(event.target.value))));
  let wide = root.clientWidth;
  new ResizeObserver(() => { if (rounds[shown] && Math.abs(root.clientWidth - wide) > 24) { wide = root.clientWidth; svg.classList.add('still'); const was = svg.dataset.stage; draw(shown); stage(was); } }).observe(root);
  const theme = () => root.classList.toggle('dark', document.body.classList.contains('dark'));
  new MutationObserver(theme).observe(document.body, { attributes: true, attributeFilter: ['class'] });
  theme();
  return { update, state: () => ({ race, rounds, shown, playing }) };
}
