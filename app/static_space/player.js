// The static page: plays recorded races from traces/ with the same files as the live one. ?trace=NAME chooses one.

const view = createView(document.getElementById('race'));
const chooser = document.getElementById('traces'), themeButton = document.getElementById('theme');

async function play(file) {
  const answer = await fetch(`traces/${encodeURIComponent(file)}`);
  const race = answer.ok ? parseDocument(await answer.text()) : null;
  document.getElementById('prompt').textContent = race ? inert(race.settings.prompt) : `There is no readable trace ${file}.`;
  // a run's name of its own, so that the same trace chosen again starts anew
  if (race) view.update(JSON.stringify({ ...race, recorded: true, run: `${race.run}-${performance.now()}` }));
}

function setTheme(dark) {
  document.body.classList.toggle('dark', dark);
  themeButton.setAttribute('aria-pressed', String(dark));
}

async function start() {
  setTheme(matchMedia('(prefers-color-scheme: dark)').matches);
  themeButton.addEventListener('click', () => setTheme(!document.body.classList.contains('dark')));
  const list = await (await fetch('traces/index.json')).json();
  for (const { file, title } of list) chooser.add(new Option(title, file));
  const wanted = new URLSearchParams(location.search).get('trace');
  if (list.some(({ file }) => file === wanted)) chooser.value = wanted;
  chooser.addEventListener('change', () => play(chooser.value));
  await play(chooser.value);
}

start();
