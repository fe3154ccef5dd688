// Masks as the library lowers them: each row's visible runs come from Python, tiles are classified here.
const maskViewer = (() => {
  const { byId } = panels;
  const SORTS = [
    { name: "hidden", colour: "var(--skip)" },
    { name: "cut", colour: "var(--k)" },
    { name: "full", colour: "var(--v)" },
  ];
  let figures = null;

  const overlap = (runs, from, to) => {
    let seen = 0;
    for (let at = 0; at < runs.length; at += 2) seen += Math.max(0, Math.min(to, runs[at + 1]) - Math.max(from, runs[at]));
    return seen;
  };

  // For each tile 0 hidden, 1 cut or 2 full; and how many there are of each.
  function classify({ seqlen, rows }, block) {
    const side = schedule.ceilDiv(seqlen, block);
    const sorts = new Uint8Array(side * side);
    const counts = [0, 0, 0];
    for (let i = 0; i < side; i += 1) {
      for (let j = 0; j < side; j += 1) {
        const [bottom, right] = [Math.min(seqlen, (i + 1) * block), Math.min(seqlen, (j + 1) * block)];
        let seen = 0;
        for (let row = i * block; row < bottom; row += 1) seen += overlap(rows[row], j * block, right);
        const sort = seen === 0 ? 0 : seen < (bottom - i * block) * (right - j * block) ? 1 : 2;
        sorts[i * side + j] = sort;
        counts[sort] += 1;
      }
    }
    return { side, sorts, counts };
  }

  function draw(mask, block, { side, sorts }) {
    const { context, side: extent } = svg.board(byId("mask-board"));
    const cell = extent / mask.seqlen;
    const ink = Object.fromEntries(["skip", "k", "v", "line", "surface"].map((name) => [name, svg.colour(name)]));
    const tile = (at) => Math.min(mask.seqlen, at * block) * cell;
    for (let i = 0; i < side; i += 1) {
      for (let j = 0; j < side; j += 1) {
        const [x, y, w, h] = [tile(j), tile(i), tile(j + 1) - tile(j), tile(i + 1) - tile(i)];
        const sort = sorts[i * side + j];
        context.fillStyle = sort === 2 ? ink.v : ink.skip;
        context.fillRect(x, y, w, h);
        if (sort !== 1) continue;
        context.fillStyle = ink.k;
        for (let row = i * block; row < Math.min(mask.seqlen, (i + 1) * block); row += 1) {
          const runs = mask.rows[row];
          for (let at = 0; at < runs.length; at += 2) {
            const from = Math.max(j * block, runs[at]);
            const to = Math.min((j + 1) * block, runs[at + 1]);
            if (to > from) context.fillRect(from * cell, row * cell, (to - from) * cell, cell + 0.5);
          }
        }
      }
    }
    context.strokeStyle = ink.surface;
    context.lineWidth = side > 32 ? 0.75 : 1.5;
    context.beginPath();
    for (let at = 0; at <= side; at += 1) {
      context.moveTo(tile(at), 0);
      context.lineTo(tile(at), extent);
      context.moveTo(0, tile(at));
      context.lineTo(extent, tile(at));
    }
    context.stroke();
  }

  function render() {
    const mask = figures.masks[Number(byId("mask").value)];
    const block = Number(byId("mask-block").value);
    const found = classify(mask, block);
    draw(mask, block, found);
    table(mask, block);
    const tiles = found.side ** 2;
    byId("mask-name").textContent = mask.name;
    byId("mask-code").textContent = mask.code;
    svg.legend(byId("mask-counts"), SORTS.map(({ name, colour }, sort) => [colour, `${name} ${format.count(found.counts[sort])} of ${format.count(tiles)}`]).reverse());
    svg.bar(byId("mask-bar"), SORTS.map(({ colour }, sort) => [colour, found.counts[sort] / tiles]).reverse());
    byId("mask-bar").setAttribute("aria-label", byId("mask-counts").textContent);
    const agree = String(found.counts) === String(mask.tiles[block]);
    byId("mask-verdict").className = `verdict ${agree ? "good" : "bad"}`;
    const work = (100 * (tiles - found.counts[0])) / tiles;
    const visible = (100 * mask.visible) / mask.seqlen ** 2;
    byId("mask-verdict").textContent = `${agree ? "✓ Tiles as the library counts them" : "✗ The library counts other tiles"}: ${work.toFixed(0)} % of the full work for ${visible.toFixed(0)} % of the pairs.`;
  }

  // The same mask at every tile size: smaller tiles follow it more closely.
  function table(mask, block) {
    const host = byId("mask-table");
    host.replaceChildren();
    const head = svg.html(svg.html(host, "thead"), "tr");
    for (const name of ["tile", "full", "cut", "hidden", "work"]) svg.html(head, "th", { scope: "col" }, name);
    const body = svg.html(host, "tbody");
    for (const [size, [hidden, cut, full]] of Object.entries(mask.tiles)) {
      const row = svg.html(body, "tr", Number(size) === block ? { class: "chosen" } : {});
      svg.html(row, "th", { scope: "row" }, `${size} × ${size}`);
      const work = (100 * (cut + full)) / (hidden + cut + full);
      for (const text of [format.count(full), format.count(cut), format.count(hidden), `${work.toFixed(0)} %`]) svg.html(row, "td", {}, text);
    }
  }

  function start(all) {
    figures = all;
    svg.options(byId("mask"), figures.masks.map(({ name }, index) => [String(index), name]), "0");
    svg.options(byId("mask-block"), Object.keys(figures.masks[0].tiles).map((block) => [block, `${block} × ${block}`]), "16");
    for (const id of ["mask", "mask-block"]) byId(id).addEventListener("input", render);
    render();
  }

  return { start, render, classify };
})();
