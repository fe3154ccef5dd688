// Reads the embedded figures, sets the theme, starts every part, and redraws when the window or the theme changes.
const page = (() => {
  const { byId } = panels;
  const figures = JSON.parse(byId("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  // A page opened from a file may be refused storage; the choice then lasts until the page is closed.
  const stored = {
    get() {
      try {
        return window.localStorage.getItem("tilewise-theme");
      } catch {
        return null;
      }
    },
    set(theme) {
      try {
        window.localStorage.setItem("tilewise-theme", theme);
      } catch {
        /* lasts until the page is closed */
      }
    },
  };

  let chosen = stored.get();

  function applyTheme() {
    const theme = chosen ?? (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    const other = theme === "dark" ? "Light" : "Dark";
    byId("theme").textContent = other;
    byId("theme").setAttribute("aria-label", `Switch to ${other.toLowerCase()} colours`);
  }

  function redraw() {
    traversal.render();
    rooflines.render();
    maskViewer.render();
    pipelines.render();
  }

  // Redraw when the page gets another width: a window that is resized, a scroll bar, a first layout that comes late. A
  // phone's address bar changes the height alone.
  function followWidth() {
    let width = document.body.clientWidth;
    const update = () => {
      if (document.body.clientWidth === width) return;
      width = document.body.clientWidth;
      redraw();
    };
    // In a frame of its own: drawings change the height of what is observed.
    new ResizeObserver(() => window.requestAnimationFrame(update)).observe(document.body);
  }

  // Totals of walks whose closed forms Python worked out: those that differ.
  function disagreements() {
    return figures.sets.filter((set) => {
      const { steps, at } = schedule.walk(set);
      const { read, written } = at(steps.length);
      return read !== set.read || written !== set.written || schedule.standardTotal(set) !== set.standard;
    });
  }

  function start() {
    applyTheme();
    const { given, device } = settings.fromAddress(window.location.hash, figures.initial);
    traversal.start(given, []);
    rooflines.start(figures, device);
    maskViewer.start(figures);
    pipelines.start(figures);
    byId("theme").addEventListener("click", () => {
      chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      stored.set(chosen);
      applyTheme();
      redraw();
    });
    dark.addEventListener("change", () => {
      applyTheme();
      redraw();
    });
    followWidth();
  }

  start();
  return { figures, disagreements };
})();
