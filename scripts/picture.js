// Draws a recorded race as an animated SVG, by the page's own export:  node scripts/picture.js TRACE.json > race.svg

const fs = require('fs'), path = require('path'), vm = require('vm');

const folder = path.join(__dirname, '..', 'app', 'ui', 'static');
const context = vm.createContext({ URL, Intl });
for (const name of ['rounds.js', 'tree.js', 'export.js']) vm.runInContext(fs.readFileSync(path.join(folder, name), 'utf8'), context, { filename: name });
context.trace = fs.readFileSync(process.argv[2], 'utf8');
const drawn = vm.runInContext('(race => race && animatedSvg(race))(parseDocument(trace))', context);
if (!drawn) { console.error(`${process.argv[2]} is no trace`); process.exit(2); }
process.stdout.write(drawn + '\n');
