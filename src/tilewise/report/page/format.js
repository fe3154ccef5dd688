// Numbers as people read them.
const format = (() => {
  const PREFIXES = ["", "k", "M", "G", "T", "P"];

  const count = (x) => Math.round(x).toLocaleString("en-US");

  // Three digits and a prefix: 1.05 M.
  function short(x, unit = "") {
    let power = 0;
    let scaled = x;
    while (Math.abs(scaled) >= 999.5 && power < PREFIXES.length - 1) {
      scaled /= 1000;
      power += 1;
    }
    const digits = Math.abs(scaled) >= 100 || Number.isInteger(scaled) ? 0 : Math.abs(scaled) >= 10 ? 1 : 2;
    return `${scaled.toFixed(digits)} ${PREFIXES[power]}${unit}`.trim();
  }

  function time(milliseconds) {
    const [value, unit] = milliseconds >= 1 ? [milliseconds, "ms"] : [milliseconds * 1000, "µs"];
    return `${value >= 100 ? value.toFixed(0) : value.toPrecision(3)} ${unit}`;
  }

  const signed = (x, digits = 3) => (Number.isFinite(x) ? (x < 0 ? "−" : "") + Math.abs(x).toFixed(digits) : x < 0 ? "−∞" : "∞");
  const ratio = (x) => `${x >= 10 ? x.toFixed(0) : x.toFixed(1)}×`;

  return { count, short, time, signed, ratio };
})();
