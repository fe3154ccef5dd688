// Roofline of a device, its floor times, and how traffic and memory grow with N. Every figure is Python's.
const rooflines = (() => {
  const { byId } = panels;
  const IDEAS = [
    { key: "standard", colour: "var(--s)", text: "standard: S and P through HBM" },
    { key: "v2", colour: "var(--q)", text: "tiled, v2 from one SM's SRAM" },
    { key: "once", colour: "var(--v)", text: "each tensor once, as caches allow" },
  ];
  let figures = null;

  const chosen = () => ({
    device: figures.devices.find(({ name }) => name === byId("device").value),
    d: byId("roof-d").value,
    pass: byId("roof-pass").value,
    mask: byId("roof-causal").checked ? "causal" : "full",
    at: Number(byId("roof-n").value),
  });

  const power = (x) => (x >= 1024 * 1024 ? `${x / 1048576} M` : x >= 1024 ? `${x / 1024} k` : `${x}`);

  function roof() {
    const { device, d, pass, mask, at } = chosen();
    const points = { ...figures.costs[d][pass][mask] };
    // The walk over the tiles is of the forward.
    if (pass === "forward") points.v2 = points.once.map(({ flops }, index) => ({ flops, bytes: figures.traffic[device.name][d][mask].v2[index] }));
    const ideas = IDEAS.filter(({ key }) => key in points);
    const n = figures.lengths[at];
    byId("roof-n-out").textContent = `N = ${format.count(n)}`;
    byId("roof-n").setAttribute("aria-valuetext", byId("roof-n-out").textContent);
    const drawing = svg.canvas(byId("roof-chart"), 380, `Roofline of ${device.name} with attention at N = ${n}`);
    const peak = device.tflops * 1e12;
    const bandwidth = device.tb_s * 1e12;
    const attained = (intensity) => Math.min(peak, intensity * bandwidth);
    const ticks = [0.25, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536];
    const scales = svg.axes(drawing, { x: [0.25, 65536], y: [1e12, 1e16], xTicks: ticks, xText: (x) => (x < 1 ? "¼" : power(x)), yText: (y) => format.short(y), xLabel: "FLOP per byte of HBM traffic", yLabel: "FLOP/s that the device can reach" });
    const { sx, sy, box } = scales;
    const ridge = device.balance;
    svg.line(drawing, [[sx(0.25), sy(attained(0.25))], [sx(ridge), sy(peak)], [sx(65536), sy(peak)]], "var(--ink)");
    svg.add(drawing.root, "line", { class: "axis", x1: sx(ridge), x2: sx(ridge), y1: sy(peak), y2: box.bottom, "stroke-dasharray": "3 4" });
    svg.add(drawing.root, "text", { x: sx(ridge) + 6, y: box.bottom - 8 }, `balance ${ridge.toFixed(0)} FLOP/B`);
    svg.add(drawing.root, "text", { class: "strong", x: box.right, y: sy(peak) - 8, "text-anchor": "end" }, `${format.short(peak)}FLOP/s`);
    for (const { key, colour } of ideas) trail(drawing, scales, points[key], attained, colour, at);
    const decode = figures.decode[d][at];
    const x = sx(decode.flops / decode.bytes);
    const y = sy(attained(decode.flops / decode.bytes));
    svg.add(drawing.root, "path", { d: `M${x} ${y - 7}l7 7l-7 7l-7 -7z`, fill: "var(--o)", stroke: "var(--surface)", "stroke-width": 2 });
    svg.legend(byId("roof-legend"), [...ideas.map(({ key, colour, text }) => [colour, `${text}, ${intensityText(points[key][at])}`]), ["var(--o)", `decoding, one query, ${intensityText(decode)}`]]);
    floors(points, at, device, pass);
  }

  const intensityText = ({ flops, bytes }) => `${format.short(flops / bytes)} FLOP/B`;

  function trail(drawing, { sx, sy }, series, attained, colour, at) {
    series.forEach(({ flops, bytes }, index) => {
      const intensity = flops / bytes;
      const now = index === at;
      svg.add(drawing.root, "circle", { cx: sx(intensity), cy: sy(attained(intensity)), r: now ? 8 : 3.5, fill: colour, stroke: "var(--surface)", "stroke-width": now ? 2.5 : 0, opacity: now ? 1 : 0.45 });
    });
  }

  function floors(points, at, device, pass) {
    const table = byId("floors");
    const n = format.count(figures.lengths[at]);
    table.replaceChildren();
    byId("floors-caption").textContent = `Floor of one ${pass} call, batch 1, ${figures.heads} heads, N ${n}, fp16: no implementation is faster. Standard attention pays at least its own bytes.`;
    const head = svg.html(svg.html(table, "thead"), "tr");
    for (const name of ["device", "balance, FLOP/B", "standard", "tiled", "bound by", "ratio"]) svg.html(head, "th", { scope: "col" }, name);
    const body = svg.html(table, "tbody");
    for (const on of figures.devices) {
      const time = ({ flops, bytes }) => figures.heads * 1e3 * Math.max(flops / (on.tflops * 1e12), bytes / (on.tb_s * 1e12));
      const [standard, once] = [points.standard[at], points.once[at]];
      const row = svg.html(body, "tr", on === device ? { class: "chosen" } : {});
      svg.html(row, "th", { scope: "row", title: on.source }, on.name);
      const bound = once.flops / once.bytes > on.balance ? "arithmetic" : "memory";
      for (const text of [on.balance.toFixed(0), format.time(time(standard)), format.time(time(once)), bound, format.ratio(time(standard) / time(once))]) svg.html(row, "td", {}, text);
    }
  }

  function growth(host, legend, label, series, extra) {
    const drawing = svg.canvas(host, 320, label);
    const values = series.flatMap(({ values: own }) => own).filter((value) => value > 0);
    const y = [10 ** Math.floor(Math.log10(Math.min(...values))), 10 ** Math.ceil(Math.log10(Math.max(...values)))];
    const { lengths } = figures;
    const { sx, sy, box } = svg.axes(drawing, { x: [lengths[0], lengths.at(-1)], y, xTicks: lengths, xText: power, yText: (value) => format.short(value, "B"), xLabel: "N", yLabel: "", left: 66 });
    for (const { value, text } of extra.filter((mark) => mark.value < y[1])) {
      svg.add(drawing.root, "line", { class: "axis", x1: box.left, x2: box.right, y1: sy(value), y2: sy(value), "stroke-dasharray": "3 4" });
      svg.add(drawing.root, "text", { x: box.left + 6, y: sy(value) - 5 }, text);
    }
    const { at } = chosen();
    for (const { values: own, colour, dash } of series) {
      svg.line(drawing, own.map((value, index) => [sx(lengths[index]), sy(value)]), colour, dash ? { "stroke-dasharray": dash } : {});
      svg.add(drawing.root, "circle", { cx: sx(lengths[at]), cy: sy(own[at]), r: 5, fill: colour, stroke: "var(--surface)", "stroke-width": 2 });
    }
    svg.legend(legend, series.map(({ values: own, colour, text }) => [colour, `${text} ${format.short(own[at], "B")}`]));
  }

  function scaling() {
    const { device, d, mask } = chosen();
    const traffic = figures.traffic[device.name][d][mask];
    const memory = figures.memory;
    growth(byId("traffic-chart"), byId("traffic-legend"), "HBM traffic against N", [
      { values: traffic.standard, colour: "var(--s)", text: "standard" },
      { values: traffic.v1, colour: "var(--k)", text: "v1" },
      { values: traffic.v2, colour: "var(--q)", text: "v2" },
      { values: traffic.once, colour: "var(--v)", text: "each tensor once", dash: "6 4" },
    ], []);
    growth(byId("memory-chart"), byId("memory-legend"), "Memory against N", [
      { values: memory.standard, colour: "var(--s)", text: "standard, S and P" },
      { values: memory.v1, colour: "var(--k)", text: "v1, m and ℓ" },
      { values: memory.v2, colour: "var(--q)", text: "v2, L" },
    ], [{ value: device.hbm_gb * 1e9, text: `all of the ${device.name}, for one head` }]);
  }

  function render() {
    roof();
    scaling();
  }

  // `asked`: a device named by the address.
  function start(all, asked) {
    figures = all;
    const names = figures.devices.map(({ name }) => name);
    const known = asked === null || names.includes(asked);
    byId("device-notes").textContent = known ? "" : `Unknown device “${asked}”; showing ${figures.initial.device}. Known: ${names.join(", ")}.`;
    svg.options(byId("device"), names.map((name) => [name, name]), known && asked ? asked : figures.initial.device);
    svg.options(byId("roof-d"), Object.keys(figures.costs).map((d) => [d, d]), "128");
    byId("roof-n").max = figures.lengths.length - 1;
    byId("roof-n").value = figures.lengths.indexOf(8192);
    for (const id of ["device", "roof-d", "roof-pass", "roof-causal", "roof-n"]) byId(id).addEventListener("input", render);
    render();
  }

  return { start, render };
})();
