// What stands beside the board: the step in words, SRAM, the race of the HBM counters, and one row's state.
const panels = (() => {
  const { START, KEYS, QUERIES, COMPUTE, WRITE } = schedule;
  const NAMES = { q: "Q", k: "K", v: "V", o: "O", stats: "row statistics" };
  const paint = (name) => `var(--${name})`;
  const byId = (id) => document.getElementById(id);

  function range(name, first, count) {
    return count === 1 ? `${name} ${first}` : `${name}s ${first}–${first + count - 1}`;
  }

  function words(walk, done) {
    const p = walk.plan;
    if (done === 0) return "Nothing has moved yet: Q, K and V are in HBM, SRAM is empty.";
    const [kind, i, j] = walk.steps[done - 1];
    const rows = i < 0 ? "" : range("row", i * p.rows, p.rowsOf(i));
    const keys = j < 0 ? "" : range("key", j * p.keys, p.keysOf(j));
    const last = done === walk.steps.length ? " That was the last step." : "";
    if (kind === START) return "Write O = 0, ℓ = 0 and m = −∞ to HBM: version 1 keeps every row's state there between visits.";
    if (kind === KEYS) return `Load K and V of ${keys}.`;
    if (kind === QUERIES) return p.order === "v1" ? `Load Q, and back again O, m and ℓ, of ${rows}.` : `Load Q of ${rows}; O = 0, ℓ = 0, m = −∞ start on chip.`;
    if (kind === COMPUTE) return `Scores of ${rows} × ${keys}${p.cut(i, j) ? ", the diagonal runs through" : ""}: update m, rescale ℓ and O by α, add P·V.`;
    return (p.order === "v1" ? `Write O, m and ℓ of ${rows} back.` : `Divide O by ℓ, write O and L = m + log ℓ of ${rows}.`) + last;
  }

  // What the order of the loops means for traffic.
  function order({ order: chosen, keyTiles, rowTiles }) {
    const times = (count) => (count === 1 ? "once" : `${format.count(count)} times`);
    return chosen === "v1"
      ? `Version 1 takes keys in the outer loop: K and V are read once, but Q, O and every row's m and ℓ come back for each tile of keys, up to ${times(keyTiles)}, and O is divided by ℓ each time.`
      : `Version 2 takes queries in the outer loop: O, m and ℓ stay on chip and O is written once, while K and V are read for each tile of rows, up to ${times(rowTiles)}.`;
  }

  // Elements on chip after `done` steps, by buffer.
  function onChip(walk, done) {
    const p = walk.plan;
    const now = board.live(walk, done);
    const rows = now.i < 0 ? 0 : p.rowsOf(now.i);
    const keys = now.j < 0 ? 0 : p.keysOf(now.j);
    const scores = now.kind === COMPUTE ? rows * keys : 0;
    return { q: rows * p.d, k: keys * p.d, v: keys * p.d, o: rows * p.d, registers: scores + 2 * rows };
  }

  function sram(walk, done) {
    const held = onChip(walk, done);
    const buffers = ["q", "k", "v", "o"];
    const used = buffers.reduce((sum, name) => sum + held[name], 0);
    svg.bar(byId("sram"), buffers.map((name) => [paint(name), held[name] / walk.plan.m]));
    byId("sram").setAttribute("aria-label", `${format.count(used)} of ${format.count(walk.plan.m)} elements in use`);
    byId("sram-note").textContent = `${format.count(used)} of ${format.count(walk.plan.m)} elements`;
    const entries = buffers.map((name) => [paint(name), `${NAMES[name]} ${format.count(held[name])}`]);
    svg.legend(byId("sram-legend"), [...entries, [paint("s"), `in registers: scores, m, ℓ ${format.count(held.registers)}`]]);
  }

  // Standard attention's three kernels, as far as the same share of the walk.
  function standardAt(settings, share) {
    const kernels = schedule.standard(settings).map((kernel) => kernel.read + kernel.written);
    let left = share * kernels.reduce((a, b) => a + b, 0);
    return kernels.map((elements) => {
      const moved = Math.min(elements, left);
      left -= moved;
      return moved;
    });
  }

  function buildRace(host) {
    host.replaceChildren();
    return ["tiled", "standard"].map((name) => {
      const entry = svg.html(host, "div");
      const text = svg.html(entry, "div", { class: "line" });
      const label = svg.html(text, "span");
      const number = svg.html(text, "b", { id: `moved-${name}` });
      const bar = svg.html(entry, "div", { class: "bar", role: "img" });
      const fill = svg.html(bar, "div", { class: "fill" });
      const goal = svg.html(bar, "div", { class: "goal" });
      return { label, number, bar, fill, goal, detail: svg.html(entry, "small") };
    });
  }

  let lanes = null;

  function race(walk, done) {
    lanes ??= buildRace(byId("race"));
    const [tiled, standard] = lanes;
    const p = walk.plan;
    const form = schedule.closedForm(p);
    const full = schedule.standardTotal(p);
    const widest = Math.max(full, form.read + form.written);
    const at = walk.at(done);
    const share = done / walk.steps.length;
    tiled.label.textContent = `tiled, ${p.order}${p.causal ? ", causal" : ""}`;
    tiled.number.textContent = format.count(at.read + at.written);
    svg.bar(tiled.fill, at.byTensor.map(({ name, elements }) => [paint(name), elements / widest]));
    tiled.bar.setAttribute("aria-label", `${tiled.number.textContent} elements moved`);
    tiled.detail.textContent = at.byTensor.map(({ name, elements }) => `${NAMES[name]} ${format.short(elements)}`).join(" · ");
    tiled.goal.style.width = `${(100 * (form.read + form.written)) / widest}%`;
    standard.goal.style.width = `${(100 * full) / widest}%`;
    const parts = standardAt(p, share);
    standard.label.textContent = "standard";
    standard.number.textContent = format.count(parts.reduce((a, b) => a + b, 0));
    svg.bar(standard.fill, parts.map((elements, index) => [`color-mix(in srgb, var(--stats) ${100 - 22 * index}%, var(--surface))`, elements / widest]));
    standard.bar.setAttribute("aria-label", `${standard.number.textContent} elements moved`);
    standard.detail.textContent = schedule.standard(p).map(({ name }, index) => `${name} ${format.short(parts[index])}`).join(" · ");
    verdict(walk, done, at, form, full);
  }

  function verdict(walk, done, at, form, full) {
    const node = byId("closed");
    const expected = form.read + form.written;
    const moved = at.read + at.written;
    if (done < walk.steps.length) {
      node.className = "verdict";
      const other = walk.plan.order === "v1" ? "v2" : "v1";
      const there = schedule.closedForm({ ...walk.plan, order: other });
      node.textContent = `Closed forms: ${walk.plan.order} ${format.count(expected)}, ${other} ${format.count(there.read + there.written)}, standard ${format.count(full)}.`;
      return;
    }
    const agree = moved === expected && at.read === form.read;
    node.className = `verdict ${agree ? "good" : "bad"}`;
    node.textContent = agree
      ? `✓ Counted ${format.count(moved)}, exactly the closed form. Standard moves ${format.ratio(full / moved)} as much.`
      : `✗ Counted ${format.count(moved)}, but the closed form says ${format.count(expected)}.`;
  }

  // When the walk touches a row's tile: the steps that compute it, and the last one of all.
  function touches(walk, row) {
    const i = Math.floor(row / walk.plan.rows);
    const found = { i, computed: [], last: 0 };
    walk.steps.forEach(([kind, other], step) => {
      if (other !== i) return;
      found.last = step + 1;
      if (kind === COMPUTE) found.computed.push(step + 1);
    });
    return found;
  }

  // Where the row's state lives after `done` steps.
  function whereabouts(walk, touched, done) {
    if (board.live(walk, done).i === touched.i) return "on chip";
    if (done >= touched.last) return "finished, in HBM";
    const begun = walk.plan.order === "v1" ? done > 0 : done >= touched.computed[0];
    return begun ? "waits in HBM" : "not started";
  }

  function row(walk, { at, states, touched }, done) {
    const seen = touched.computed.filter((step) => step <= done).length;
    const finished = done >= touched.last;
    const state = states[seen];
    byId("row-where").textContent = whereabouts(walk, touched, done);
    const cells = [["m, maximum", format.signed(state.m)], ["ℓ, sum", state.l.toFixed(3)], ["α, last", seen ? state.alpha.toFixed(4) : "–"], ["tiles met", `${seen} of ${states.length - 1}`]];
    const list = byId("state");
    list.replaceChildren();
    for (const [name, value] of cells) {
      const cell = svg.html(list, "div");
      svg.html(cell, "dt", {}, name);
      svg.html(cell, "dd", {}, value);
    }
    const [left, right] = pictures(byId("history"));
    maxima(left, states, seen);
    outputs(right, walk.plan, state, states);
    rowVerdict(finished ? rowstate.difference(walk.plan, at, states) : null);
  }

  // `off`: how far the finished row is from softmax over all of it; null while it is not finished.
  function rowVerdict(off) {
    const node = byId("row-verdict");
    const equal = off < 1e-9;
    node.className = `verdict ${off === null ? "" : equal ? "good" : "bad"}`;
    if (off === null) node.textContent = "α = exp(m − m′) brings ℓ and O to the new maximum before the tile's share is added.";
    else node.textContent = `${equal ? "✓ Equal to" : "✗ Not"} softmax over the whole row: largest difference ${off.toExponential(1)}.`;
  }

  function pictures(host) {
    if (host.children.length === 0) for (let index = 0; index < 2; index += 1) svg.html(host, "div");
    return host.children;
  }

  // m after every tile that the row meets: done ones solid; where it rises, what was gathered is scaled by α < 1.
  function maxima(host, states, seen) {
    const drawing = svg.canvas(host, 96, "Row maximum m, tile by tile");
    const known = states.slice(1).map(({ m }) => m);
    const [low, high] = [Math.min(...known.filter(Number.isFinite)), Math.max(...known)];
    const x = (tile) => 8 + ((drawing.width - 16) * (tile + 0.5)) / known.length;
    const y = (m) => 84 - (Number.isFinite(m) ? ((m - low) / (high - low || 1)) * 50 : 0);
    svg.add(drawing.root, "text", { x: 0, y: 11 }, "m, tile by tile; ring: it rose, α < 1");
    svg.line(drawing, known.map((m, tile) => [x(tile), y(m)]), "var(--line-strong)", { "stroke-width": 1, "stroke-dasharray": "3 3" });
    if (seen > 0) svg.line(drawing, known.slice(0, seen).map((m, tile) => [x(tile), y(m)]), "var(--s)");
    const dot = Math.min(4.5, Math.max(1.5, (drawing.width / known.length) * 0.3));
    known.slice(0, seen).forEach((m, tile) => {
      const rose = tile > 0 && states[tile + 1].alpha < 1;
      svg.add(drawing.root, "circle", { cx: x(tile), cy: y(m), r: rose ? dot + 1.5 : dot, fill: rose ? "var(--surface)" : "var(--s)", stroke: "var(--s)", "stroke-width": rose ? 2.5 : 0 });
    });
  }

  // The first columns of the row's output: as it will be (outline) and as it is (filled).
  function outputs(host, plan, state, states) {
    const shown = Math.min(plan.d, rowstate.SHOWN);
    const drawing = svg.canvas(host, 96, `O of this row, first ${shown} of ${plan.d} columns`);
    const goal = rowstate.normalised(states.at(-1));
    const current = rowstate.normalised(state);
    const most = Math.max(1e-9, ...states.flatMap((other) => [...rowstate.normalised(other).slice(0, shown)].map(Math.abs)));
    const middle = 56;
    const step = (drawing.width - 4) / shown;
    svg.add(drawing.root, "text", { x: 0, y: 11 }, "Õ / ℓ so far; outline: the result");
    svg.add(drawing.root, "line", { class: "axis", x1: 0, x2: drawing.width, y1: middle, y2: middle });
    for (let c = 0; c < shown; c += 1) {
      const block = (value, attributes) => {
        const height = Math.max(0.5, (Math.abs(value) / most) * 36);
        svg.add(drawing.root, "rect", { x: 2 + c * step + step * 0.14, width: step * 0.72, y: value < 0 ? middle : middle - height, height, rx: 2, ...attributes });
      };
      block(current[c], { fill: "var(--o)" });
      block(goal[c], { fill: "none", stroke: "var(--ink)", "stroke-width": 1.25, "stroke-dasharray": "3 2" });
    }
  }

  return { words, order, sram, race, row, touches, paint, byId };
})();
