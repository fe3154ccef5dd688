// Small helpers for the document and for SVG: elements, axes, legends. Colours are the style sheet's variables.
const svg = (() => {
  const SPACE = "http://www.w3.org/2000/svg";
  // Of a drawing: axes, margins and labels take part of it. A host can be narrower, down to nothing, until the browser
  // has given the page its place; it is drawn anew when that has come.
  const LEAST = 160;

  function add(parent, name, attributes = {}, text = "") {
    const node = document.createElementNS(SPACE, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    parent.append(node);
    return node;
  }

  function html(parent, name, attributes = {}, text = "") {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    parent.append(node);
    return node;
  }

  // What lies between two places less a margin, and nothing where there is no room for it.
  const room = (from, to, margin = 0) => Math.max(0, to - from - margin);

  // A fresh drawing that fills its host's width; what it shows is said in `label`.
  function canvas(host, height, label, minWidth = 0) {
    host.replaceChildren();
    const width = Math.max(minWidth, LEAST, Math.floor(host.clientWidth));
    const root = add(host, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    if (minWidth) root.style.maxWidth = "none";
    return { root, width, height };
  }

  const logScale = ([low, high], [from, to]) => (x) => from + ((Math.log(x) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from);

  // Log-log axes with a grid line for each power of `xBase` and of ten. Returns the two scales.
  function axes(drawing, { x, y, xTicks, xText, yText, xLabel, yLabel, left = 58 }) {
    const { root, width, height } = drawing;
    const box = { left, right: width - 22, top: 30, bottom: height - 42 };
    const sx = logScale(x, [box.left, box.right]);
    const sy = logScale(y, [box.bottom, box.top]);
    const every = Math.max(1, Math.ceil((46 * xTicks.length) / (box.right - box.left)));
    xTicks.forEach((tick, index) => {
      add(root, "line", { class: "grid", x1: sx(tick), x2: sx(tick), y1: box.top, y2: box.bottom });
      if (index % every === 0) add(root, "text", { x: sx(tick), y: box.bottom + 16, "text-anchor": "middle" }, xText(tick));
    });
    const decades = [];
    for (let power = Math.ceil(Math.log10(y[0]) - 1e-9); power <= Math.log10(y[1]) + 1e-9; power += 1) decades.push(10 ** power);
    const skip = Math.max(1, Math.ceil(decades.length / 7));
    decades.forEach((tick, index) => {
      add(root, "line", { class: "grid", x1: box.left, x2: box.right, y1: sy(tick), y2: sy(tick) });
      if (index % skip === 0) add(root, "text", { x: box.left - 6, y: sy(tick) + 4, "text-anchor": "end" }, yText(tick));
    });
    add(root, "path", { class: "axis", fill: "none", d: `M${box.left} ${box.top}V${box.bottom}H${box.right}` });
    add(root, "text", { x: box.right, y: height - 6, "text-anchor": "end" }, xLabel);
    add(root, "text", { x: 0, y: 12 }, yLabel);
    return { sx, sy, box };
  }

  function line(drawing, points, colour, extra = {}) {
    const d = points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    add(drawing.root, "path", { d, fill: "none", stroke: colour, "stroke-width": 2.5, "stroke-linejoin": "round", ...extra });
  }

  // Entries [colour, "hatch" or null for no key, text].
  function legend(host, entries) {
    host.replaceChildren();
    for (const [colour, text] of entries) {
      const entry = html(host, "span");
      if (colour !== null) {
        const key = html(entry, "i", { "aria-hidden": "true" });
        if (colour === "hatch") key.className = "hatch";
        else key.style.background = colour;
      }
      entry.append(text);
    }
  }

  // Shares of a bar: [colour, fraction of its width].
  function bar(host, shares) {
    while (host.children.length > shares.length) host.lastChild.remove();
    while (host.children.length < shares.length) html(host, "span");
    shares.forEach(([colour, share], index) => {
      host.children[index].style.cssText = `background:${colour};width:${(100 * share).toFixed(3)}%`;
    });
  }

  function options(select, entries, chosen) {
    select.replaceChildren();
    for (const [value, text] of entries) html(select, "option", { value, ...(value === chosen ? { selected: "" } : {}) }, text);
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // A 2-D context in CSS pixels, sharp on every screen, with its side.
  function board(node) {
    const side = node.clientWidth;
    const scale = window.devicePixelRatio || 1;
    if (node.width !== Math.round(side * scale)) node.width = node.height = Math.round(side * scale);
    const context = node.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, side, side);
    return { context, side };
  }

  function hatch(context, x, y, w, h, ink) {
    context.save();
    context.beginPath();
    context.rect(x, y, w, h);
    context.clip();
    context.strokeStyle = ink;
    context.lineWidth = 1;
    context.beginPath();
    for (let at = -h; at < w; at += 5) {
      context.moveTo(x + at, y + h);
      context.lineTo(x + at + h, y);
    }
    context.stroke();
    context.restore();
  }

  return { add, html, canvas, axes, line, legend, bar, options, colour, board, hatch, room };
})();
