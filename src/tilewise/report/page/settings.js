// What the controls may say. A value that cannot be drawn is moved to the nearest that can, and the page says why.
const settings = (() => {
  const DEFAULTS = { n: 512, d: 16, m: 4096, order: "v2", causal: false };
  const NAMES = { n: "N", d: "d", m: "M", row: "row" };

  function whole(name, given, [low, high], fallback, notes) {
    const value = typeof given === "number" ? given : Number(String(given).trim() || NaN);
    if (!Number.isFinite(value)) {
      notes.push(`${NAMES[name]} must be a whole number; set to ${format.count(fallback)}.`);
      return fallback;
    }
    const kept = Math.min(high, Math.max(low, Math.round(value)));
    if (kept !== value) {
      notes.push(`${NAMES[name]} is a whole number from ${format.count(low)} to ${format.count(high)}; set to ${format.count(kept)}.`);
    }
    return kept;
  }

  // The largest N whose tiles can still be drawn.
  function largestN(tile) {
    return schedule.MAX_TILES * Math.min(tile.rows, tile.keys);
  }

  // Settings that can be drawn, with a sentence for each that had to change.
  function clamp(given) {
    const notes = [];
    const { LIMITS } = schedule;
    const d = whole("d", given.d, LIMITS.d, DEFAULTS.d, notes);
    let m = whole("m", given.m, LIMITS.m, DEFAULTS.m, notes);
    const least = schedule.smallestSram(d);
    if (m < least) {
      notes.push(`M must hold one row each of Q, K, V and O: at least 4d = ${format.count(least)} elements at d = ${d}; set to ${format.count(least)}.`);
      m = least;
    }
    const order = given.order === "v1" ? "v1" : "v2";
    if (given.order !== order) notes.push(`The order is v1 or v2; set to ${order}.`);
    let n = whole("n", given.n, LIMITS.n, DEFAULTS.n, notes);
    const tile = schedule.tileSizes(order, d, m);
    if (n > largestN(tile)) {
      n = largestN(tile);
      notes.push(`At most ${schedule.MAX_TILES} × ${schedule.MAX_TILES} tiles are drawn; with tiles of ${tile.rows} × ${tile.keys}, N was set to ${format.count(n)}.`);
    }
    const row = given.row === undefined ? Math.floor(n / 2) : whole("row", given.row, [0, n - 1], Math.floor(n / 2), notes);
    return { values: { n, d, m, order, causal: Boolean(given.causal), row }, notes };
  }

  // The address's fragment, such as #n=256&order=v1&causal=1, over what the page was written with.
  function fromAddress(fragment, written) {
    const given = { ...DEFAULTS, ...written };
    const said = new URLSearchParams(fragment.replace(/^#/, ""));
    for (const name of ["n", "d", "m", "row", "order"]) if (said.has(name)) given[name] = said.get(name);
    if (said.has("causal")) given.causal = said.get("causal") === "1";
    return { given, device: said.get("device"), touched: [...said.keys()].length > 0 };
  }

  return { DEFAULTS, clamp, fromAddress };
})();
