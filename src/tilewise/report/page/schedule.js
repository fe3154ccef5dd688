// The order in which tiles are visited, and every element that crosses between HBM and SRAM on the way.
//
// Counts are made move by move. `closedForm` gives their totals without walking; the page shows both.
const schedule = (() => {
  const LIMITS = { n: [1, 16384], d: [1, 256], m: [4, 1 << 20] };
  const MAX_TILES = 128; // a side: more could not be told apart on a screen
  const TENSORS = ["q", "k", "v", "o", "stats"];
  const START = 0, KEYS = 1, QUERIES = 2, COMPUTE = 3, WRITE = 4;

  const ceilDiv = (a, b) => Math.floor((a + b - 1) / b);
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

  // Rows and keys of a tile: four tiles of M/4 elements (Q, K, V, O). Rounded up they would not fit.
  function tileSizes(order, d, m) {
    const side = Math.floor(m / (4 * d));
    return { rows: order === "v1" ? Math.min(side, d) : side, keys: side };
  }

  const smallestSram = (d) => 4 * d;

  function plan({ n, d, m, order, causal }) {
    const tile = tileSizes(order, d, m);
    const rows = Math.min(tile.rows, n);
    const keys = Math.min(tile.keys, n);
    return {
      n, d, m, order, causal, rows, keys,
      rowTiles: ceilDiv(n, rows),
      keyTiles: ceilDiv(n, keys),
      rowsOf: (i) => Math.min(rows, n - i * rows),
      keysOf: (j) => Math.min(keys, n - j * keys),
      // A tile is skipped where even its last row comes before its first key.
      sees: (i, j) => !causal || j * keys < Math.min(n, (i + 1) * rows),
      cut: (i, j) => causal && Math.min(n, (j + 1) * keys) - 1 > i * rows,
    };
  }

  // Visits [kind, row tile, key tile] in the order of the listing; -1 where there is none.
  function* visits(p) {
    if (p.order === "v1") {
      yield [START, -1, -1];
      for (let j = 0; j < p.keyTiles; j += 1) {
        yield [KEYS, -1, j];
        for (let i = 0; i < p.rowTiles; i += 1) {
          if (!p.sees(i, j)) continue;
          yield [QUERIES, i, j];
          yield [COMPUTE, i, j];
          yield [WRITE, i, j];
        }
      }
    } else {
      for (let i = 0; i < p.rowTiles; i += 1) {
        yield [QUERIES, i, -1];
        for (let j = 0; j < p.keyTiles; j += 1) {
          if (!p.sees(i, j)) continue;
          yield [KEYS, i, j];
          yield [COMPUTE, i, j];
        }
        yield [WRITE, i, -1];
      }
    }
  }

  // What one visit moves: [tensor, elements read, elements written].
  function moves(p, kind, i, j) {
    const rows = i < 0 ? 0 : p.rowsOf(i) * p.d;
    if (kind === KEYS) return [["k", p.keysOf(j) * p.d, 0], ["v", p.keysOf(j) * p.d, 0]];
    if (kind === COMPUTE) return [];
    if (p.order === "v1") {
      if (kind === START) return [["o", 0, p.n * p.d], ["stats", 0, 2 * p.n]];
      if (kind === QUERIES) return [["q", rows, 0], ["o", rows, 0], ["stats", 2 * p.rowsOf(i), 0]];
      return [["o", 0, rows], ["stats", 0, 2 * p.rowsOf(i)]];
    }
    return kind === QUERIES ? [["q", rows, 0]] : [["o", 0, rows], ["stats", 0, p.rowsOf(i)]];
  }

  // The whole walk: its visits, and what had been moved before each of them (random access, for scrubbing).
  function walk(settings) {
    const p = plan(settings);
    const steps = [...visits(p)];
    const counts = {};
    for (const name of TENSORS) {
      counts[name] = { read: new Float64Array(steps.length + 1), written: new Float64Array(steps.length + 1) };
    }
    steps.forEach(([kind, i, j], step) => {
      for (const { read, written } of Object.values(counts)) {
        read[step + 1] = read[step];
        written[step + 1] = written[step];
      }
      for (const [name, read, written] of moves(p, kind, i, j)) {
        counts[name].read[step + 1] += read;
        counts[name].written[step + 1] += written;
      }
    });
    const at = (done) => ({
      read: sum(TENSORS.map((name) => counts[name].read[done])),
      written: sum(TENSORS.map((name) => counts[name].written[done])),
      byTensor: TENSORS.map((name) => ({ name, elements: counts[name].read[done] + counts[name].written[done] })),
    });
    return { plan: p, steps, at, tilesVisited: steps.filter(([kind]) => kind === COMPUTE).length };
  }

  // Totals without walking. Causal: a column of tiles meets the rows from its own on, a row of tiles the keys up to its own.
  function closedForm(settings) {
    const { n, d, order, causal, rows, keys, rowTiles, keyTiles } = plan(settings);
    const upTo = (count, f) => sum(Array.from({ length: count }, (_, t) => f(t)));
    if (order === "v1") {
      const met = upTo(keyTiles, (j) => (causal ? n - Math.floor((j * keys) / rows) * rows : n));
      return { read: 2 * n * d + met * (2 * d + 2), written: n * (d + 2) + met * (d + 2) };
    }
    const met = upTo(rowTiles, (i) => (causal ? Math.min(n, ceilDiv(Math.min(n, (i + 1) * rows), keys) * keys) : n));
    return { read: n * d + 2 * d * met, written: n * (d + 1) };
  }

  // Standard attention: S = QKᵀ is written, read for the softmax, P is written, read for PV.
  function standard({ n, d }) {
    return [
      { name: "S = QKᵀ", read: 2 * n * d, written: n * n },
      { name: "P = softmax(S)", read: n * n, written: n * n },
      { name: "O = PV", read: n * n + n * d, written: n * d },
    ];
  }

  const standardTotal = (settings) => sum(standard(settings).map((kernel) => kernel.read + kernel.written));

  return {
    LIMITS, MAX_TILES, START, KEYS, QUERIES, COMPUTE, WRITE, TENSORS,
    ceilDiv, tileSizes, smallestSram, plan, walk, closedForm, standard, standardTotal,
  };
})();
