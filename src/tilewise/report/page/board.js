// The matrix of score tiles with Q and O beside it, K and V above it, at one moment of a walk.
const board = (() => {
  const STRIP = 0.035; // thickness of a strip of tiles, in sides of the board
  const GAP = 0.012;
  const { KEYS, QUERIES, COMPUTE, WRITE } = schedule;

  // Which tiles were computed when: 1 + the step, or 0.
  function computedAt(walk) {
    const { rowTiles, keyTiles } = walk.plan;
    const at = new Uint32Array(rowTiles * keyTiles);
    walk.steps.forEach(([kind, i, j], step) => {
      if (kind === COMPUTE) at[i * keyTiles + j] = step + 1;
    });
    return at;
  }

  function geometry(side, { rowTiles, keyTiles }) {
    const strip = side * STRIP;
    const gap = side * GAP;
    const label = 18;
    const start = label + 2 * (strip + gap);
    const extent = svg.room(start, side, 1);
    return {
      strip, gap, label, start, extent,
      x: (j) => start + (extent * j) / keyTiles,
      y: (i) => start + (extent * i) / rowTiles,
    };
  }

  function strips(context, g, plan, live, colours) {
    const cell = (n, t, at, along, colour, on) => {
      const from = along === "x" ? g.x(t) : g.y(t);
      const size = svg.room(from, along === "x" ? g.x(t + 1) : g.y(t + 1), n > 40 ? 0.3 : 1.5);
      context.globalAlpha = on ? 1 : 0.28;
      context.fillStyle = colour;
      if (along === "x") context.fillRect(from, at, size, g.strip);
      else context.fillRect(at, from, g.strip, size);
    };
    const first = g.label;
    const second = g.label + g.strip + g.gap;
    for (let j = 0; j < plan.keyTiles; j += 1) {
      cell(plan.keyTiles, j, first, "x", colours.k, live.j === j);
      cell(plan.keyTiles, j, second, "x", colours.v, live.j === j);
    }
    for (let i = 0; i < plan.rowTiles; i += 1) {
      cell(plan.rowTiles, i, first, "y", colours.q, live.i === i);
      cell(plan.rowTiles, i, second, "y", colours.o, live.i === i);
    }
    context.globalAlpha = 1;
    context.font = "600 13px system-ui, sans-serif";
    context.textBaseline = "middle";
    const name = (text, x, y, colour) => {
      context.fillStyle = colour;
      context.textAlign = "center";
      context.fillText(text, x, y);
    };
    name("K", 8, first + g.strip / 2, colours.k);
    name("V", 8, second + g.strip / 2, colours.v);
    name("Q", first + g.strip / 2, 8, colours.q);
    name("O", second + g.strip / 2, 8, colours.o);
  }

  function tiles(context, g, plan, done, computed, colours) {
    const inset = Math.max(plan.keyTiles, plan.rowTiles) > 40 ? 0.3 : 1.5;
    for (let i = 0; i < plan.rowTiles; i += 1) {
      for (let j = 0; j < plan.keyTiles; j += 1) {
        const [x, y] = [g.x(j), g.y(i)];
        const [w, h] = [svg.room(x, g.x(j + 1), inset), svg.room(y, g.y(i + 1), inset)];
        const when = computed[i * plan.keyTiles + j];
        if (when === 0) {
          context.fillStyle = colours.bg;
          context.fillRect(x, y, w, h);
          if (w > 4) svg.hatch(context, x, y, w, h, colours.hatch);
          continue;
        }
        context.fillStyle = when <= done ? colours.done : colours.skip;
        if (when === done) context.fillStyle = colours.s;
        context.fillRect(x, y, w, h);
      }
    }
  }

  function marks(context, g, plan, live, row, colours) {
    const y = g.start + (g.extent * (row + 0.5)) / plan.n;
    context.strokeStyle = colours.ink;
    context.lineWidth = 1;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(g.start, y);
    context.lineTo(g.start + g.extent, y);
    context.stroke();
    context.setLineDash([]);
    if (live.i < 0 || live.j < 0) return;
    context.strokeStyle = colours.s;
    context.lineWidth = 3;
    context.strokeRect(g.x(live.j) - 1, g.y(live.i) - 1, g.x(live.j + 1) - g.x(live.j), g.y(live.i + 1) - g.y(live.i));
  }

  // What is on chip after `done` steps: the tile of rows and the tile of keys, -1 for none.
  function live(walk, done) {
    if (done === 0) return { i: -1, j: -1, kind: -1 };
    const [kind, i, j] = walk.steps[done - 1];
    if (walk.plan.order === "v1") return { i: kind === QUERIES || kind === COMPUTE ? i : -1, j, kind, written: kind === WRITE ? i : -1 };
    return { i: kind === WRITE ? -1 : i, j: kind === KEYS || kind === COMPUTE ? j : -1, kind, written: kind === WRITE ? i : -1 };
  }

  function draw(node, walk, computed, done, row) {
    const { context, side } = svg.board(node);
    const names = ["q", "k", "v", "o", "s", "done", "skip", "bg", "hatch", "ink"];
    const colours = Object.fromEntries(names.map((name) => [name, svg.colour(name)]));
    const g = geometry(side, walk.plan);
    const now = live(walk, done);
    tiles(context, g, walk.plan, done, computed, colours);
    strips(context, g, walk.plan, now, colours);
    marks(context, g, walk.plan, now, row, colours);
  }

  // The row that a point of the board stands for, or -1.
  function rowAt(node, walk, y) {
    const g = geometry(node.clientWidth, walk.plan);
    const row = Math.floor(((y - g.start) / g.extent) * walk.plan.n);
    return row >= 0 && row < walk.plan.n ? row : -1;
  }

  return { draw, computedAt, live, rowAt };
})();
