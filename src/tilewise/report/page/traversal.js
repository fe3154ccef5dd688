// The traversal's controls and its clock.
const traversal = (() => {
  const { byId } = panels;
  const SECONDS = 24; // that a whole walk takes at speed 1, unless it is short
  const STEPS_PER_SECOND = 4; // at speed 1, at least: a short walk is not dragged out
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
  const state = { settings: null, walk: null, computed: null, row: null, done: 0, cancel: null, position: 0 };

  function render() {
    const { walk, done } = state;
    board.draw(byId("board"), walk, state.computed, done, state.row.at);
    byId("now").textContent = panels.words(walk, done);
    byId("progress").textContent = `step ${format.count(done)} of ${format.count(walk.steps.length)}`;
    byId("scrub").value = done;
    byId("scrub").setAttribute("aria-valuetext", byId("progress").textContent);
    panels.sram(walk, done);
    panels.race(walk, done);
    panels.row(walk, state.row, done);
  }

  function facts() {
    const { walk } = state;
    const form = schedule.closedForm(walk.plan);
    const full = schedule.standardTotal(walk.plan);
    const { n, rows, keys, rowTiles, keyTiles } = walk.plan;
    const entries = [
      ["tile, rows × keys", `${format.count(rows)} × ${format.count(keys)}`],
      ["tiles computed", `${format.count(walk.tilesVisited)} of ${format.count(rowTiles * keyTiles)}`],
      ["HBM traffic, standard to tiled", `${format.ratio(full / (form.read + form.written))}`],
      ["scores written to HBM", `0 of ${format.short(n * n)}`],
    ];
    byId("facts").replaceChildren();
    for (const [name, value] of entries) {
      const cell = svg.html(byId("facts"), "div");
      svg.html(cell, "dt", {}, name);
      svg.html(cell, "dd", {}, value);
    }
  }

  function follow(at) {
    state.row = { at, states: rowstate.history(state.walk.plan, at), touched: panels.touches(state.walk, at) };
    byId("row").value = at;
  }

  function show(values) {
    for (const name of ["n", "d", "m"]) byId(name).value = values[name];
    document.querySelector(`input[name="order"][value="${values.order}"]`).checked = true;
    byId("causal").checked = values.causal;
  }

  // Take over what the controls, or an address, ask for; what cannot be drawn is mended and explained.
  function apply(given, extraNotes = []) {
    pause();
    const { values, notes } = settings.clamp(given);
    state.settings = values;
    state.walk = schedule.walk(values);
    state.computed = board.computedAt(state.walk);
    byId("notes").textContent = [...extraNotes, ...notes].join(" ");
    byId("order-note").textContent = panels.order(state.walk.plan);
    byId("scrub").max = state.walk.steps.length;
    show(values);
    follow(values.row);
    facts();
    svg.legend(byId("board-legend"), [["var(--s)", "this tile"], ["var(--done)", "computed"], ["var(--skip)", "to come"], ...(values.causal ? [["hatch", "hidden, skipped"]] : []), ["var(--ink)", "row that is followed"]]);
    seek(0);
  }

  function seek(done) {
    state.done = Math.min(state.walk.steps.length, Math.max(0, Math.round(done)));
    render();
  }

  function playing() {
    return state.cancel !== null;
  }

  function pause() {
    state.cancel?.();
    state.cancel = null;
    byId("play").textContent = "Play";
    byId("play").setAttribute("aria-label", "Play");
    byId("now").setAttribute("aria-live", "polite");
  }

  function play() {
    if (state.done === state.walk.steps.length) seek(0);
    byId("play").textContent = "Pause";
    byId("play").setAttribute("aria-label", "Pause");
    byId("now").setAttribute("aria-live", "off"); // a screen reader could not follow, and would not stop
    state.position = state.done;
    let before = performance.now();
    const tick = () => {
      const now = performance.now();
      const rate = Number(byId("speed").value) * Math.max(STEPS_PER_SECOND, state.walk.steps.length / SECONDS);
      state.position += ((now - before) / 1000) * rate;
      before = now;
      if (Math.floor(state.position) !== state.done) seek(Math.floor(state.position));
      if (state.done === state.walk.steps.length) pause();
      else next();
    };
    // Asked for less motion, the board changes twice a second instead of at every frame.
    const next = () => {
      if (calm.matches) {
        const timer = window.setTimeout(tick, 500);
        state.cancel = () => window.clearTimeout(timer);
      } else {
        const frame = window.requestAnimationFrame(tick);
        state.cancel = () => window.cancelAnimationFrame(frame);
      }
    };
    next();
  }

  const step = (by) => {
    pause();
    seek(state.done + by);
  };

  function read() {
    const order = document.querySelector('input[name="order"]:checked').value;
    return { n: byId("n").value, d: byId("d").value, m: byId("m").value, order, causal: byId("causal").checked, row: state.row.at };
  }

  function keys(event) {
    const size = state.walk.steps.length;
    const actions = { " ": () => (playing() ? pause() : play()), ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => step(-size), End: () => step(size) };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  function connect() {
    byId("controls").addEventListener("change", () => apply(read()));
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
    for (const [name, factor] of [["halve", 0.5], ["double", 2]]) {
      for (const button of document.querySelectorAll(`[data-${name}]`)) {
        button.addEventListener("click", () => {
          const id = button.dataset[name];
          apply({ ...read(), [id]: Math.round(state.settings[id] * factor) });
        });
      }
    }
    byId("first").addEventListener("click", () => step(-state.walk.steps.length));
    byId("last").addEventListener("click", () => step(state.walk.steps.length));
    byId("back").addEventListener("click", () => step(-1));
    byId("forward").addEventListener("click", () => step(1));
    byId("play").addEventListener("click", () => (playing() ? pause() : play()));
    byId("scrub").addEventListener("input", () => step(Number(byId("scrub").value) - state.done));
    byId("board").addEventListener("keydown", keys);
    byId("board").addEventListener("click", (event) => {
      const row = board.rowAt(byId("board"), state.walk, event.offsetY);
      if (row >= 0) chooseRow(row);
    });
    byId("row").addEventListener("change", () => chooseRow(byId("row").value));
  }

  function chooseRow(row) {
    const { values, notes } = settings.clamp({ ...state.settings, row });
    state.settings = values;
    byId("notes").textContent = notes.join(" ");
    follow(values.row);
    render();
  }

  function start(given, notes) {
    connect();
    apply(given, notes);
  }

  return { start, apply, seek, render, state, playing };
})();
