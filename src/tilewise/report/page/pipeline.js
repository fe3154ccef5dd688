// The timeline of one Hopper thread block: who works when, and what is left idle. Simulated by the textbook, drawn here.
const pipelines = (() => {
  const { byId } = panels;
  const ROW = 46;
  const KINDS = {
    load: ["var(--stats)", "TMA loads"],
    scores: ["var(--q)", "S = QKᵀ"],
    softmax: ["var(--s)", "softmax"],
    values: ["var(--v)", "O += PV"],
  };
  let figures = null;

  const runsOf = (d) => figures.pipeline.runs[d];

  function render() {
    const runs = runsOf(byId("pipe-d").value);
    const run = runs[Number(byId("schedule").value)];
    chart(run, Math.max(...runs.map(({ cycles }) => cycles)));
    table(runs, run);
  }

  function chart(run, longest) {
    const { lanes } = figures.pipeline;
    const drawing = svg.canvas(byId("pipe-chart"), lanes.length * ROW + 34, `Timeline of ${run.name}`, 860);
    const left = 118;
    const x = (cycles) => left + ((drawing.width - left - 8) * cycles) / longest;
    lanes.forEach((lane, index) => {
      const y = 10 + index * ROW;
      svg.add(drawing.root, "rect", { x: left, y, width: drawing.width - left - 8, height: ROW - 6, rx: 5, fill: "var(--sunken)" });
      svg.add(drawing.root, "text", { class: "strong", x: 0, y: y + ROW / 2 + 1 }, lane);
    });
    for (const span of run.spans) block(drawing, span, x);
    svg.add(drawing.root, "line", { class: "axis", x1: x(run.cycles), x2: x(run.cycles), y1: 4, y2: 10 + lanes.length * ROW, "stroke-dasharray": "3 3" });
    svg.add(drawing.root, "text", { x: x(run.cycles), y: 26 + lanes.length * ROW, "text-anchor": "end" }, `${format.count(run.cycles)} cycles`);
    svg.legend(byId("pipe-legend"), [...Object.values(KINDS), [null, "A, B: whose; numbers: key tiles"]]);
  }

  // Lanes of consumers show products above softmaxes, those of units the first consumer above the second.
  function block({ root }, { lane, who, kind, start, end, label }, x) {
    const consumer = lane === 1 || lane === 2;
    const half = consumer ? (kind === "softmax" ? 1 : 0) : who === 2 ? 1 : 0;
    const height = lane === 0 ? ROW - 10 : (ROW - 11) / 2;
    const y = 12 + lane * ROW + half * (height + 1);
    const width = Math.max(1, x(end) - x(start) - 1);
    const node = svg.add(root, "rect", { x: x(start), y, width, height, rx: 3, fill: KINDS[kind][0] });
    const whose = who ? `consumer ${"AB"[who - 1]}, key tile ${label}` : label;
    svg.add(node, "title", {}, `${KINDS[kind][1]}, ${whose}: cycles ${format.count(start)} to ${format.count(end)}`);
    const text = who && !consumer ? `${"AB"[who - 1]}${label}` : label;
    if (width > 9 * text.length) svg.add(root, "text", { x: x(start) + width / 2, y: y + height / 2 + 4, "text-anchor": "middle", class: "within" }, text);
  }

  function table(runs, run) {
    const host = byId("pipe-table");
    host.replaceChildren();
    const head = svg.html(svg.html(host, "thead"), "tr");
    for (const name of ["schedule", "cycles", "tensor cores busy", "exp units busy"]) svg.html(head, "th", { scope: "col" }, name);
    const body = svg.html(host, "tbody");
    for (const other of runs) {
      const row = svg.html(body, "tr", other === run ? { class: "chosen" } : {});
      svg.html(row, "th", { scope: "row" }, other.name);
      for (const text of [format.count(other.cycles), `${(100 * other.tensor).toFixed(0)} %`, `${(100 * other.exp).toFixed(0)} %`]) svg.html(row, "td", {}, text);
    }
  }

  function start(all) {
    figures = all;
    const dims = Object.keys(figures.pipeline.runs);
    svg.options(byId("pipe-d"), dims.map((d) => [d, d]), "128");
    const { runs } = figures.pipeline;
    svg.options(byId("schedule"), runs[dims[0]].map(({ name }, index) => [String(index), name]), String(runs[dims[0]].length - 1));
    for (const id of ["schedule", "pipe-d"]) byId(id).addEventListener("input", render);
    render();
  }

  return { start, render };
})();
