// One row's (m, l, O) as keys arrive tile by tile, computed for real on inputs drawn from a seed.
const rowstate = (() => {
  const SHOWN = 8; // columns of O that the page draws

  // Standard normal numbers from (seed, index): each row of Q, K and V can be had alone.
  function normals(seed, row, length) {
    let state = (Math.imul(seed, 0x9e3779b1) ^ Math.imul(row + 1, 0x85ebca6b)) >>> 0;
    const uniform = () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let t = Math.imul(state ^ (state >>> 15), 1 | state);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
    return Float64Array.from({ length }, () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform()));
  }

  const dot = (a, b) => a.reduce((total, x, c) => total + x * b[c], 0);

  // Scores of one row against the keys first .. last, masked ones left out.
  function scoresOf(q, { row, d, causal }, first, last) {
    const found = [];
    for (let key = first; key < last; key += 1) {
      if (causal && key > row) break;
      found.push({ key, s: (2 * dot(q, normals(2, key, d))) / Math.sqrt(d) });
    }
    return found;
  }

  // m' = max(m, max s);  α = exp(m − m');  l' = α l + Σ exp(s − m');  O' = α O + Σ exp(s − m') v
  function update(state, scores, d) {
    if (scores.length === 0) return { ...state, alpha: 1 };
    const m = Math.max(state.m, ...scores.map(({ s }) => s));
    const alpha = Math.exp(state.m - m);
    let l = alpha * state.l;
    const o = state.o.map((x) => alpha * x);
    for (const { key, s } of scores) {
      const p = Math.exp(s - m);
      l += p;
      const v = normals(3, key, d);
      for (let c = 0; c < d; c += 1) o[c] += p * v[c];
    }
    return { m, l, o, alpha };
  }

  const empty = (d) => ({ m: -Infinity, l: 0, o: new Float64Array(d), alpha: 1 });
  const normalised = ({ o, l }) => o.map((x) => (l > 0 ? x / l : 0));

  // The row's state after each tile of keys that it meets: [0] is before the first.
  function history(plan, row) {
    const at = { row, d: plan.d, causal: plan.causal };
    const q = normals(1, row, plan.d);
    const i = Math.floor(row / plan.rows);
    const states = [empty(plan.d)];
    for (let j = 0; j < plan.keyTiles; j += 1) {
      if (!plan.sees(i, j)) continue;
      const scores = scoresOf(q, at, j * plan.keys, j * plan.keys + plan.keysOf(j));
      states.push({ ...update(states.at(-1), scores, plan.d), j });
    }
    return states;
  }

  // The same row by the textbook's two passes, and how far the tiles' result is from it.
  function difference(plan, row, states) {
    const scores = scoresOf(normals(1, row, plan.d), { row, d: plan.d, causal: plan.causal }, 0, plan.n);
    const whole = normalised(update(empty(plan.d), scores, plan.d));
    const tiled = normalised(states.at(-1));
    return whole.reduce((worst, x, c) => Math.max(worst, Math.abs(x - tiled[c])), 0);
  }

  return { SHOWN, history, normalised, difference };
})();
