// Draws the tree of one round as SVG. What a round says is in rounds.js; what it looks like in each stage is CSS's:
//   seed   every node on its parent, unseen      draft  each at its place, level by level
//   check  the target looks at those worth it      keep   the kept path lights up, the own token joins, the rest fades

const SVG = 'http://www.w3.org/2000/svg';
const GAP = { x: 34, row: 38, node: 28, margin: 12, indent: 20, outlineRow: 34 };

function svgElement(tag, attributes, parent) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (parent) parent.appendChild(made);
  return made;
}

// Left edges, rows to heights: {places: Map node → {x, y, width}, width, height}.
function placeNodes(layout, outline) {
  const widths = [];
  for (const item of layout.items) widths[item.depth] = Math.max(widths[item.depth] || 0, item.width);
  const left = widths.map((_, depth) => outline ? GAP.margin + depth * GAP.indent : GAP.margin + widths.slice(0, depth).reduce((a, w) => a + w + GAP.x, 0));
  const step = outline ? GAP.outlineRow : GAP.row, places = new Map();
  for (const item of layout.items) places.set(item.node, { x: left[item.depth], y: GAP.margin + GAP.node / 2 + item.row * step, width: item.width });
  const right = Math.max(...layout.items.map(item => left[item.depth] + item.width));
  return { places, width: right + GAP.margin, height: 2 * GAP.margin + GAP.node + (layout.rows - 1) * step };
}

// The line from a parent to a child, as a path.
function edgePath(from, to, outline) {
  if (outline) return `M${from.x + 9} ${from.y + GAP.node / 2}V${to.y}H${to.x}`;
  const x = from.x + from.width, middle = (x + to.x) / 2;
  return Math.abs(from.y - to.y) < 1 ? `M${x} ${from.y}H${to.x}` : `M${x} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`;
}

function drawNode(group, round, item, place) {
  const state = stateOf(round, item.node), own = state === 'own', round_ = state === 'root' || own;
  const half = GAP.node / 2;
  svgElement('rect', { class: 'box', x: 0, y: -half, width: place.width, height: GAP.node, rx: round_ ? half : 7 }, group);
  const text = svgElement('text', { x: 11, y: 0 }, group);
  if (state === 'kept' || own) svgElement('tspan', { class: 'mark' }, text).textContent = own ? '◆ ' : '✓ ';
  if (item.space) svgElement('tspan', { class: 'space' }, text).textContent = '·';
  svgElement('tspan', {}, text).textContent = item.shown;
  if (state === 'kept' || state === 'dropped' || state === 'cut') {
    svgElement('rect', { class: 'chance', x: 8, y: half - 4.5, height: 2.5, rx: 1.25, width: Math.max(2, (place.width - 16) * draftChance(round, item.node)) }, group);
  }
}

// Draws a round into `svg`, in stage "seed". Returns {width, height} and the groups by node.
function drawTree(svg, round, before, outline) {
  const layout = layoutRound(round, before, outline), { places, width, height } = placeNodes(layout, outline);
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.setAttribute('data-stage', 'seed');
  const edges = svgElement('g', { class: 'edges', 'aria-hidden': 'true' }, svg), nodes = svgElement('g', {}, svg), groups = new Map();
  for (const item of layout.items) {
    const place = places.get(item.node), from = item.node ? places.get(item.parent) : place, state = stateOf(round, item.node);
    const order = state === 'own' ? round.kept.length : round.kept.indexOf(item.node);
    const style = `--depth:${item.depth};--order:${Math.max(0, order)};--x:${place.x}px;--y:${place.y}px;--fx:${from.x}px;--fy:${from.y}px`;
    if (item.node) svgElement('path', { class: `edge ${state}`, style, d: edgePath(from, place, outline) }, edges);
    const group = svgElement('g', { class: `node ${state}`, style, 'data-node': item.node, tabindex: item.node ? -1 : 0, role: 'treeitem', 'aria-level': item.depth + 1, 'aria-label': item.node ? nodeSentence(round, item.node) : `${item.shown} (the text so far)` }, nodes);
    drawNode(group, round, item, place);
    groups.set(item.node, group);
  }
  return { width, height, groups };
}

// The node to which an arrow key leads, or null.
function neighbour(round, node, key) {
  const children = childrenOf(round), siblings = node ? children[parentOf(round, node)] : [0];
  const place = siblings.indexOf(node);
  const found = { ArrowRight: children[node][0], ArrowLeft: node ? parentOf(round, node) : undefined, ArrowUp: siblings[place - 1], ArrowDown: siblings[place + 1], Home: 0 }[key];
  return found === undefined ? null : found;
}

if (typeof module !== 'undefined') module.exports = { placeNodes, edgePath, GAP };
